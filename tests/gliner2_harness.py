"""Running a prepared ``deberta_gliner2`` checkpoint without vLLM, and comparing results with the library's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gliner2 import GLiNER2, Schema
from safetensors.torch import load_file

from harness import LocalEngine
from vllm_factory.io.gliner2 import Gliner2Pipeline
from vllm_factory.io.limits import Limits
from vllm_factory.io.tokens import WordTokenizer
from vllm_factory.plugins.deberta_gliner2.config import DebertaGliner2Config
from vllm_factory.plugins.deberta_gliner2.network import DebertaGliner2Network


class Gliner2Engine(LocalEngine):
    """A prepared ``deberta_gliner2`` checkpoint in this process; see :class:`harness.LocalEngine`."""

    def __init__(self, path: Path, max_tokens: int | None = None, limits: Limits | None = None) -> None:
        hf_config = json.loads((path / "config.json").read_text())
        config = DebertaGliner2Config.from_hf(type("HfConfig", (), {"factory": hf_config["factory"]}))
        self.max_tokens = max_tokens or hf_config["max_position_embeddings"]
        self.network: Any = DebertaGliner2Network(config).eval()
        self.network.load_state_dict(load_file(path / "model.safetensors"), strict=True)
        self.network.prepare(self.max_tokens)
        self.pipeline: Any = Gliner2Pipeline(
            config.head, WordTokenizer(path / "tokenizer.json"), self.max_tokens, limits or Limits()
        )


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
