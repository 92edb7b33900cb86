"""Long texts as gliner2 2.1.0 reads them: chunks of words, and one result made of theirs (``chunking.py``).

Chunks are read with scores and offsets, whatever the client asked for, and what was not asked for is taken out of
the merged result. Where it cannot be told what a value is, the library goes by its looks; so does this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_factory.io.gliner2_decoding import Results
from vllm_factory.io.gliner2_overlap import Policy, select_spans
from vllm_factory.io.gliner2_prompt import ENTITIES
from vllm_factory.io.words import Word

_SPAN_KEYS = ("text", "confidence", "start", "end")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some neighbouring words of a text, and what is between them."""

    text: str
    start: int


def chunks_of(text: str, words: Sequence[Word], size: int, overlap: int) -> list[Chunk]:
    """Chunks of ``size`` words of which neighbours share ``overlap``; a text without words is one of its own."""
    if not words:
        return [Chunk(text, 0)]
    found = []
    for first in range(0, len(words), size - overlap):
        last = min(first + size, len(words))
        start = words[first][1]
        found.append(Chunk(text[start : words[last - 1][2]], start))
        if last == len(words):
            break
    return found


@dataclass(frozen=True, slots=True)
class Merger:
    """Makes one result of those of a text's chunks.

    Attributes:
        text: The whole text.
        policy: Which overlapping spans stay.
        scalars: Entity types of which only the best is wanted.
    """

    text: str
    policy: Policy
    scalars: Collection[str]

    def merge(self, chunks: Sequence[Chunk], results: Sequence[Results]) -> Results:
        """Formatted results of the chunks, with scores and offsets, as one of the text."""
        moved = [self._moved(result, chunk.start) for chunk, result in zip(chunks, results, strict=True)]
        merged: Results = {}
        for key, values in _by_key(moved).items():
            if key == ENTITIES:
                merged[key] = {label: self._entity(label, each) for label, each in _by_key(values).items()}
            elif key == "relation_extraction":
                merged[key] = {name: _distinct(_flat(each), "allow") for name, each in _by_key(values).items()}
            else:
                merged[key] = self._value(values)
        return merged

    def _moved(self, value: Any, offset: int) -> Any:
        """A value of a chunk, with offsets of the text."""
        if isinstance(value, list):
            return [self._moved(each, offset) for each in value]
        if not isinstance(value, dict):
            return value
        moved = {key: self._moved(each, offset) for key, each in value.items()}
        if _is_span(moved):
            moved["start"] += offset
            moved["end"] += offset
            # The full stop that the library adds may be behind the text.
            if moved["end"] <= len(self.text):
                moved["text"] = self.text[moved["start"] : moved["end"]]
        return moved

    def _entity(self, label: str, values: list[Any]) -> Any:
        found = _distinct(_flat(values), self.policy)
        if label in self.scalars:
            return found[0] if found else None
        return found

    def _value(self, values: list[Any]) -> Any:
        """The best class, the most frequent string, all that lists hold, or fields merged one by one."""
        given = [value for value in values if value is not None and value not in ({}, [])]
        if not given:
            return values[0]
        if all(map(_is_class, given)):
            return max(given, key=lambda value: value["confidence"])
        if all(isinstance(value, str) for value in given):
            return Counter(given).most_common(1)[0][0]
        if all(isinstance(value, list) for value in given):
            return _distinct([item for value in given for item in value], self.policy)
        if all(isinstance(value, dict) for value in given):
            return {key: self._value(each) for key, each in _by_key(given).items()}
        return given[0]


def _by_key(values: Sequence[Any]) -> dict[str, list[Any]]:
    """For each key of any of the objects, the values that they have for it."""
    found: dict[str, list[Any]] = {}
    for value in values:
        if isinstance(value, dict):
            for key, each in value.items():
                found.setdefault(key, []).append(each)
    return found


def _flat(values: Sequence[Any]) -> list[Any]:
    """Lists, single values and nothing, as one list."""
    return [
        item for value in values if value is not None for item in (value if isinstance(value, list) else [value])
    ]


def _is_span(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and "text" in value
        and isinstance(value.get("start"), int)
        and isinstance(value.get("end"), int)
    )


def _is_class(value: Any) -> bool:
    return isinstance(value, dict) and "label" in value and "confidence" in value


def _distinct(items: list[Any], policy: Policy) -> list[Any]:
    """Spans that stay, by place; then everything else once, the most certain of what reads alike."""
    spans = [item for item in items if _is_span(item)]
    start, end = (np.array([item[key] for item in spans], np.int64) for key in ("start", "end"))
    score = np.array([float(item.get("confidence", 0.0)) for item in spans])
    kept = [spans[index] for index in select_spans(start, end, score, policy)]
    kept.sort(key=lambda item: (item["start"], item["end"], item["text"]))
    best: dict[str, Any] = {}
    for item in items:
        if not _is_span(item):
            key = _signature(item)
            if key not in best or _certainty(item) > _certainty(best[key]):
                best[key] = item
    return [*kept, *best.values()]


def _signature(value: Any) -> str:
    """What a value says, leaving scores aside."""
    if isinstance(value, dict):
        return repr(sorted((key, _signature(each)) for key, each in value.items() if key != "confidence"))
    if isinstance(value, list):
        return repr([_signature(each) for each in value])
    return repr(value)


def _certainty(value: Any) -> float:
    """The score of a value, or the best one within."""
    if isinstance(value, dict) and isinstance(value.get("confidence"), int | float):
        return float(value["confidence"])
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(_certainty, inner), default=0.0)


def without_details(value: Any, confidence: bool, spans: bool) -> Any:
    """A merged value without the scores and offsets that nobody asked for."""

    def inner(each: Any) -> Any:
        return without_details(each, confidence, spans)

    if isinstance(value, list):
        return [inner(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _is_span(value):
        return _plain_span(value, confidence, spans)
    for name in ("label", "text"):
        if name in value and "confidence" in value and (name == "label" or not {"start", "end"} & value.keys()):
            return {name: value[name], "confidence": value["confidence"]} if confidence else value[name]
    return {key: inner(each) for key, each in value.items()}


def _plain_span(span: dict[str, Any], confidence: bool, spans: bool) -> Any:
    wanted: dict[str, Callable[[], bool]] = {
        "text": lambda: True,
        "confidence": lambda: confidence,
        "start": lambda: spans,
        "end": lambda: spans,
    }
    attributes = {key: each for key, each in span.items() if key not in _SPAN_KEYS}
    if not confidence and not spans and not attributes:
        return span["text"]
    return {key: span[key] for key, holds in wanted.items() if key in span and holds()} | attributes
