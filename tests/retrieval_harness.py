"""Golden files of the retrieval plugins: tiny checkpoints and the reference library's results on them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vllm_factory.published import Published
from vllm_factory.registry import PluginSpec, plugin
from vllm_factory.serving.target import find

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Golden:
    """One checkpoint and what the library made of it."""

    plugin: str
    name: str

    @property
    def path(self) -> Path:
        """The checkpoint, as published."""
        return GOLDEN / self.plugin / self.name / "checkpoint"

    @property
    def spec(self) -> PluginSpec:
        """The plugin."""
        return plugin(self.plugin)

    @property
    def published(self) -> Published:
        """The checkpoint's files."""
        return Published(self.path, self.name)

    @cache  # noqa: B019 (a few small files)
    def meta(self) -> dict[str, Any]:
        """What is in ``golden.json``."""
        content: dict[str, Any] = json.loads((self.path.parent / "golden.json").read_text(encoding="utf-8"))
        return content

    @cache  # noqa: B019
    def arrays(self) -> dict[str, np.ndarray]:
        """What is in ``golden.npz``."""
        with np.load(self.path.parent / "golden.npz") as file:
            return dict(file)

    def cases(self, **wanted: Any) -> list[dict[str, Any]]:
        """The cases that have these values; a case without ``pool_factor`` has 1."""
        return [
            case
            for case in self.meta()["cases"]
            if all(({"pool_factor": 1} | case).get(key) == value for key, value in wanted.items())
        ]

    def engine_options(self) -> dict[str, Any]:
        """What ``vllm-factory-serve`` would add, as arguments of ``LLM``."""
        target = find(str(self.path), cache=Path("unused"))
        assert target.plugin is self.spec
        options: dict[str, Any] = {"io_processor_plugin": self.spec.io_name, "runner": "pooling"}
        if target.overrides:
            options["hf_overrides"] = target.overrides
        if target.max_tokens is not None:
            options["max_model_len"] = target.max_tokens
        return options


def decoded(item: dict[str, Any]) -> np.ndarray:
    """An item of a response by numpy alone, as the documentation says."""
    kind = {"float32": "<f4", "float16": "<f2", "int8": "i1"}[item["dtype"]]
    if isinstance(item["data"], str):
        array = np.frombuffer(base64.b64decode(item["data"]), kind).reshape(item["shape"])
    else:
        array = np.array(item["data"], kind).reshape(item["shape"])
    return array * item["scale"] if item["dtype"] == "int8" else array


def assert_same_vectors(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    """Cosine of each vector above 0.9999, and the vectors themselves within 1e-4."""
    got, want = np.atleast_2d(got), np.atleast_2d(want)
    assert got.shape == want.shape, what
    cosine = (got * want).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1)
    assert cosine.min(initial=1.0) > 0.9999, what
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0, err_msg=what)


def request(case: dict[str, Any]) -> dict[str, Any]:
    """A golden case as a request's ``data``."""
    return {
        key: case[key] for key in ("text", "is_query", "prompt_name", "pool_factor") if case.get(key) is not None
    }


def ask(llm: Any, **data: Any) -> Any:
    """The response's ``data``."""
    return llm.encode({"data": data}, pooling_task="plugin", use_tqdm=False)[0].outputs


def vectors(response: dict[str, Any]) -> list[np.ndarray]:
    """All items of a response, decoded."""
    items: Any = response["embeddings"]
    found: Sequence[dict[str, Any]] = items if isinstance(items, list) else [items]
    return [decoded(item) for item in found]
