"""Running a prepared ``deberta_gliner2`` checkpoint without vLLM, and comparing results with the library's."""

from __future__ import annotations

import json
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


def assert_same_result(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    """Equal, keys in order included; numbers within the tolerance. Tuples are what JSON makes of them."""
    got, want = json.loads(json.dumps(got)), json.loads(json.dumps(want))
    assert _outline(got) == _outline(want)
    assert _numbers(got) == pytest.approx(_numbers(want), abs=tolerance, rel=0)


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
