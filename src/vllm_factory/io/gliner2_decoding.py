"""From the pooler's candidates to the library's raw results, and from those to the formatted ones.

The rules are those of gliner2 2.1.0 (``inference/runtime.py``), including what it does when two tasks are called
alike: the later answer takes the place of the earlier one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_factory.io.gliner2_overlap import Policy, select_spans
from vllm_factory.io.gliner2_prompt import ENTITIES, Options, SchemaPrompt, Section, Task
from vllm_factory.io.gliner2_request import AttributeGroup, Schema
from vllm_factory.io.words import Word

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """How spans are shown, and which of overlapping ones."""

    confidence: bool
    spans: bool
    policy: Policy | None


class Span(NamedTuple):
    """A found part of the text, and where it is among words."""

    text: str
    score: float
    start: int
    end: int
    first: int
    last: int

    def shown(self, view: View) -> Any:
        """As the library shows it."""
        if not view.confidence and not view.spans:
            return self.text
        result: dict[str, Any] = {"text": self.text}
        if view.confidence:
            result["confidence"] = self.score
        if view.spans:
            result |= {"start": self.start, "end": self.end}
        return result


class Reading:
    """One text as the model read it.

    Args:
        text: The text, with the final full stop that the library adds.
        words: Its words.
        arrays: The pooler's result.
        text_start: The first word of the text; those before it are choices.
    """

    def __init__(self, text: str, words: Sequence[Word], arrays: Sequence[np.ndarray], text_start: int) -> None:
        self.text = text
        self.words = words
        self.text_start = text_start
        self.counts, self.classes, child, record, self.first, self.last, self.value = arrays
        key = np.stack([child, record]).astype(np.int64)
        breaks = np.flatnonzero(np.any(np.diff(key, axis=1) != 0, axis=0)) + 1
        bounds = [0, *breaks.tolist(), child.size]
        self._rows = {(int(child[a]), int(record[a])): slice(a, b) for a, b in itertools.pairwise(bounds) if a < b}

    def values(self, child: int, record: int) -> dict[tuple[int, int], float]:
        """Every candidate of a child in a record, by first and last word."""
        rows = self._rows.get((child, record), slice(0, 0))
        places = zip(self.first[rows].tolist(), self.last[rows].tolist(), strict=True)
        return dict(zip(places, self.value[rows].tolist(), strict=True))

    def spans(self, child: int, record: int, policy: Policy | None) -> list[Span]:
        """Those that stay of a child's candidates in a record, best first."""
        rows = self._rows.get((child, record), slice(0, 0))
        first, last, score = self.first[rows], self.last[rows], self.value[rows]
        kept = select_spans(first, last + 1, score, policy)
        return [self._span(int(first[i]), int(last[i]), float(score[i])) for i in kept]

    def _span(self, first: int, last: int, score: float) -> Span:
        start = self.words[first - self.text_start][1]
        end = self.words[last - self.text_start][2]
        return Span(self.text[start:end], score, start, end, first, last)


class Decoder:
    """Raw results of one text.

    Args:
        schema: What was asked.
        prompt: How it was asked.
        view: How spans are shown.
        reading: What was found.
    """

    def __init__(self, schema: Schema, prompt: SchemaPrompt, view: View, reading: Reading) -> None:
        self.schema = schema
        self.prompt = prompt
        self.options: Options = prompt.options
        self.view = view
        self.reading = reading

    def results(self) -> Results:
        """One entry a task, under the task's key."""
        results: Results = {}
        first, scores = 0, 0
        for index, task in enumerate(self.prompt.tasks):
            size = len(task.children)
            if task.classification is not None:
                results[task.key] = self._classify(task, self.reading.classes[scores : scores + size])
                scores += size
            else:
                results[task.key] = self._extract(task, first, int(self.reading.counts[index]))
            first += size
        return results

    def _extract(self, task: Task, first: int, count: int) -> Any:
        children = {name: first + index for index, name in enumerate(task.children)}
        if count <= 0:
            return {} if task.section is Section.STRUCTURE and task.key != ENTITIES else []
        if task.key == ENTITIES:
            return self._entities(task, children)
        if task.section is Section.RELATION:
            return self._relations(task, children, count)
        return self._structures(task, children, count)

    @staticmethod
    def _classify(task: Task, scores: np.ndarray) -> Any:
        options = task.classification
        assert options is not None
        pairs = list(zip(task.children, scores.tolist(), strict=True))
        best = pairs[int(scores.argmax())]
        if not options.multi_label:
            return best
        chosen = [pair for pair in pairs if pair[1] >= options.cls_threshold] or [best]
        if options.top_k is not None:
            chosen = sorted(chosen, key=lambda pair: -pair[1])[: options.top_k]
        return chosen

    def _entities(self, task: Task, children: dict[str, int]) -> list[dict[str, Any]]:
        found = {
            name: self._entity(task, children, name) for name in self.schema.entities or () if name in children
        }
        return [found] if found else []

    def _entity(self, task: Task, children: dict[str, int], name: str) -> Any:
        spans = self.reading.spans(children[name], 0, self.view.policy)
        scalar = self.options.child(task, name).dtype == "str"
        if self.schema.entity_attributes and task.section is Section.ENTITY:
            attributes = dict(self._attributes(children, name))
            shown = [_with_attributes(span, attributes, self.view) for span in spans]
            return (shown[0] if shown else None) if scalar else shown
        if not scalar:
            return [span.shown(self.view) for span in spans]
        if spans:
            return spans[0].shown(self.view)
        return None if self.view.confidence or self.view.spans else ""

    def _attributes(self, children: dict[str, int], entity: str) -> Iterator[tuple[str, _GroupLogits]]:
        prompts = self.schema.attribute_prompts
        for name, group in (self.schema.entity_attributes or {}).items():
            if group.applies_to is None or entity in group.applies_to:
                logits = [self.reading.values(children[prompts[label]], 0) for label in group.labels]
                yield name, _GroupLogits(group, logits)

    def _relations(self, task: Task, children: dict[str, int], count: int) -> list[Any]:
        names = [name for name in self.options.orders.get(task.key, task.children) if name in children]
        if len(names) != 2:
            return []
        found = []
        for record in range(count):
            pair = [self.reading.spans(children[name], record, self.view.policy)[:1] for name in names]
            if all(pair):
                head, tail = (spans[0].shown(self.view) for spans in pair)
                plain = isinstance(head, str)
                found.append((head, tail) if plain else {"head": head, "tail": tail})
        return found

    def _structures(self, task: Task, children: dict[str, int], count: int) -> list[dict[str, Any]]:
        names = [name for name in self.options.orders.get(task.key, task.children) if name in children]
        records = [
            {name: self._field(task, name, children[name], record) for name in names} for record in range(count)
        ]
        return [each for each in records if any(value is not None and value != [] for value in each.values())]

    def _field(self, task: Task, name: str, child: int, record: int) -> Any:
        scalar = self.options.child(task, name).dtype == "str"
        choices = self.options.choices_of(task, name)
        if choices is not None:
            chosen = self._chosen(task, name, choices, self.reading.values(child, record), scalar)
        else:
            chosen = [span.shown(self.view) for span in self.reading.spans(child, record, self.view.policy)]
        if scalar:
            return chosen[0] if chosen else None
        return chosen

    def _chosen(
        self, task: Task, name: str, choices: list[str], values: dict[tuple[int, int], float], scalar: bool
    ) -> list[Any]:
        """Choices whose score reaches the threshold, or the best one if it does."""
        own = self.options.child(task, name).threshold
        threshold = self.prompt.threshold if own is None else own
        scored = []
        for choice in dict.fromkeys(choices):
            word = self.prompt.positions[choice.lower()]
            if (word, word) in values:
                scored.append((choice, values[word, word]))
        if scalar and scored:
            scored = [max(scored, key=lambda pair: pair[1])]
        chosen = [pair for pair in scored if pair[1] >= threshold and (pair[0] or not scalar)]
        if self.view.confidence:
            return [{"text": choice, "confidence": score} for choice, score in chosen]
        return [choice for choice, _ in chosen]


class _GroupLogits(NamedTuple):
    """An attribute group, and for each of its labels the logits by first and last word."""

    group: AttributeGroup
    logits: list[dict[tuple[int, int], float]]

    def of(self, first: int, last: int) -> Any:
        """What the group says about a span."""
        values = np.array([each[first, last] for each in self.logits], np.float32)
        labels = self.group.labels
        if self.group.multi_label:
            scores = 1 / (1 + np.exp(-values))
            pairs = zip(labels, scores.tolist(), strict=True)
            return [
                {"label": label, "confidence": score} for label, score in pairs if score >= self.group.threshold
            ]
        weights = np.exp(values - values.max())
        best = int(values.argmax())
        return {"label": labels[best], "confidence": float(weights[best] / weights.sum())}


def _with_attributes(span: Span, attributes: dict[str, _GroupLogits], view: View) -> dict[str, Any]:
    shown = span.shown(view)
    result = {"text": shown} if isinstance(shown, str) else shown
    return result | {name: each.of(span.first, span.last) for name, each in attributes.items()}


def format_results(results: Results, schema: Schema, confidence: bool) -> Results:
    """Raw results as the library hands them out: without repetitions, relations under a key of their own."""
    tasks = {each.task for each in schema.classifications or ()}
    formatted: Results = {}
    relations: Results = {}
    for key, value in results.items():
        if key in tasks:
            formatted[key] = _format_classes(value, confidence)
        elif key in (schema.relations or ()) or _looks_like_relations(value):
            relations[key] = value if isinstance(value, list) else []
        elif isinstance(value, dict):
            formatted[key] = _format_record(value)
        elif key == ENTITIES:
            formatted[key] = _format_record(value[0]) if value else {}
        else:
            formatted[key] = [_format_record(record) for record in value]
    relations |= {name: [] for name in schema.relations or () if name not in relations}
    if relations:
        formatted["relation_extraction"] = relations
    return formatted


def _looks_like_relations(value: Any) -> bool:
    """The library tells relations by their looks, so a record with a head and a tail passes for one."""
    if not isinstance(value, list) or not value:
        return False
    first = value[0]
    return isinstance(first, tuple) or {"head", "tail"} <= first.keys()


def _format_classes(value: Any, confidence: bool) -> Any:
    if isinstance(value, list):
        return [_format_classes(pair, confidence) for pair in value]
    label, score = value
    return {"label": label, "confidence": score} if confidence else label


def _format_record(record: dict[str, Any]) -> dict[str, Any]:
    return {name: _distinct(value) if isinstance(value, list) else value or None for name, value in record.items()}


def _distinct(values: list[Any]) -> list[Any]:
    """The first of values that read alike; with offsets, only at the same place."""
    found: dict[tuple[Any, ...], Any] = {}
    for value in values:
        text = value.get("text", "") if isinstance(value, dict) else value
        place = (
            (value["start"], value["end"]) if isinstance(value, dict) and {"start", "end"} <= value.keys() else ()
        )
        if text:
            found.setdefault((text.lower(), *place), value)
    return list(found.values())
