"""Running a prepared ``deberta_gliner2`` checkpoint without vLLM, and comparing results with the library's."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gliner2 import GLiNER2, Schema

from checkpoints import V2, V3
from gliner2_checkpoints import Gliner2Recipe, build_gliner2, load_gliner2
from harness import CheckpointLibrary, LocalEngine
from vllm_factory.io.gliner2 import Gliner2Pipeline
from vllm_factory.io.limits import Limits
from vllm_factory.io.tokens import WordTokenizer
from vllm_factory.plugins.deberta_gliner2.config import DebertaGliner2Config

#: Options with which a result holds scores and places.
DETAILS = {"include_confidence": True, "include_spans": True}
#: Scores that differ by less may come in either order.
TIE = 1e-5

RECIPES = {
    recipe.name: recipe
    for recipe in [
        Gliner2Recipe("lstm"),
        Gliner2Recipe("lstm-v2", head={"counting_layer": "count_lstm_v2"}, tokenizer="bpe", seed=1),
        Gliner2Recipe("lstm-moe", head={"counting_layer": "count_lstm_moe"}, tokenizer="wordpiece", seed=2),
        Gliner2Recipe("encoder-v2", encoder=V2, head={"max_width": 8}, hidden=24, seed=3),
        Gliner2Recipe(
            "absolute",
            encoder={**V3, "position_biased_input": True, "max_position_embeddings": 700},
            head={"counting_layer": "count_lstm_v2"},
            seed=4,
        ),
        Gliner2Recipe("mean", head={"token_pooling": "mean"}, tokenizer="bpe", seed=5),
        Gliner2Recipe("max", head={"token_pooling": "max", "counting_layer": "count_lstm_v2"}, seed=6),
    ]
}


class Gliner2Engine(LocalEngine):
    """A prepared ``deberta_gliner2`` checkpoint in this process; see :class:`harness.LocalEngine`."""

    def read_pipeline(self, path: Path, max_tokens: int | None, limits: Limits | None) -> Gliner2Pipeline:
        hf_config = json.loads((path / "config.json").read_text())
        head = DebertaGliner2Config.from_factory(hf_config["factory"]).head
        max_tokens = max_tokens or hf_config["max_position_embeddings"]
        return Gliner2Pipeline(head, WordTokenizer(path / "tokenizer.json"), max_tokens, limits or Limits())


class Gliner2Library(CheckpointLibrary):
    """The GLiNER2 checkpoints."""

    engine_class = Gliner2Engine

    def build(self, name: str) -> Path:
        return build_gliner2(RECIPES[name], self.directory)

    def load(self, path: Path) -> GLiNER2:
        return load_gliner2(path)


def library_answer(model: GLiNER2, data: dict[str, Any]) -> Any:
    """What the library answers to a request's ``data``."""
    options = {key: value for key, value in data.items() if key not in ("text", "schema", "labels")}
    schema = Schema.from_dict(data["schema"]) if "schema" in data else Schema().entities(data["labels"])
    extract = model.extract_long if "chunk_size" in data else model.extract
    return extract(data["text"], schema, **options)


def assert_same_result(
    got: Any, want: Any, tolerance: float = 1e-4, *, scored: Callable[[], Any] | None = None
) -> None:
    """Equal, keys in order included; numbers within the tolerance. Tuples are what JSON makes of them.

    Spans come by score, and machines round differently: where the score of two spans is the same but for rounding,
    either may come first. ``scored`` gives the wanted result with ``DETAILS``, where ``want`` holds no scores.
    """
    got, want = _as_json(got), _as_json(want)
    if _outline(got) != _outline(want):
        _assert_ties(got, want, _as_json(scored()) if scored else want)
    assert _numbers(got) == pytest.approx(_numbers(want), abs=tolerance, rel=0)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _assert_ties(got: Any, want: Any, scored: Any) -> None:
    """The same spans, out of order only where their scores say nothing about it."""
    if _outline(got) == _outline(want):
        return
    if isinstance(want, list) and want and all(map(_is_span, want)):
        assert isinstance(got, list)
        outlines = [json.dumps(_outline(each)) for each in got], [json.dumps(_outline(each)) for each in want]
        assert sorted(outlines[0]) == sorted(outlines[1])
        scores = [_score_of(each, scored) for each in got]
        assert all(later <= sooner + TIE for sooner, later in pairwise(scores)), (got, want)
    elif isinstance(want, dict) and not _is_span(want):
        assert isinstance(got, dict)
        assert list(got) == list(want)
        for key in want:
            _assert_ties(got[key], want[key], scored[key])
    elif isinstance(want, list):
        assert isinstance(got, list)
        assert len(got) == len(want)
        for one_got, one_want, one_scored in zip(got, want, scored, strict=True):
            _assert_ties(one_got, one_want, one_scored)
    else:
        raise AssertionError(f"{got!r} is not {want!r}")


def _is_span(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "text" in value)


def _score_of(span: Any, scored: list[dict[str, Any]]) -> float:
    span = {"text": span} if isinstance(span, str) else span
    keys = [key for key in ("text", "start", "end") if key in span]
    return max(each["confidence"] for each in scored if all(each[key] == span[key] for key in keys))


def _outline(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _outline(each)) for key, each in value.items()]
    if isinstance(value, list):
        return [_outline(each) for each in value]
    return "a score" if isinstance(value, float) else value


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return [value] if isinstance(value, float) else []
