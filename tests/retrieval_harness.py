"""Golden files of the retrieval plugins: tiny checkpoints and the reference library's results on them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from vllm_factory.io.limits import Limits
from vllm_factory.io.visual import VisualPipeline
from vllm_factory.poolers.multivector import Role
from vllm_factory.pooling import transport
from vllm_factory.pooling.protocol import Status
from vllm_factory.published import Published
from vllm_factory.registry import PluginSpec, plugin
from vllm_factory.serving.target import find

GOLDEN = Path(__file__).parent / "golden"
#: How plugins that read images write prompts; importing their io processors would import vLLM.
WRITERS = {
    "colqwen3": "vllm_factory.plugins.colqwen3.writer:ColQwen3Writer",
    "nemotron_colembed": "vllm_factory.plugins.nemotron_colembed.writer:NemotronWriter",
    "collfm2": "vllm_factory.plugins.collfm2.writer:ColLfm2Writer",
}


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

    def visual_pipeline(self, limits: Limits | None = None, max_tokens: int = 4096) -> VisualPipeline:
        """The pipeline of a checkpoint that reads texts and images."""
        writer = resolve_name(WRITERS[self.plugin]).read(self.published, max_tokens)
        return VisualPipeline(writer, limits or Limits())

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
        if "--limit-mm-per-prompt" in self.spec.serve_flags:
            flags = self.spec.serve_flags
            options["limit_mm_per_prompt"] = json.loads(flags[flags.index("--limit-mm-per-prompt") + 1])
        return options


#: Every stored ColBERT, and every stored embedding model.
COLBERTS = [
    *(Golden("moderncolbert", name) for name in ("hidden", "attended", "unexpanded")),
    *(Golden("lfm2_colbert", name) for name in ("hidden", "attended", "ended", "unexpanded")),
]
EMBEDDERS = [Golden("embeddinggemma", name) for name in ("mean", "joined", "no-prompt")]


def each(*goldens: Golden) -> list[Any]:
    """Checkpoints as parameters of a test, each under its plugin's marker."""
    return [
        pytest.param(golden, id=f"{golden.plugin}-{golden.name}", marks=getattr(pytest.mark, golden.plugin))
        for golden in goldens
    ]


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


_FIELDS = ("text", "is_query", "prompt_name", "prompt", "pool_factor", "dimensions")


def request(case: dict[str, Any]) -> dict[str, Any]:
    """A golden case as a request's ``data``."""
    data = {key: case[key] for key in _FIELDS if case.get(key) is not None}
    return {**data, "image": image_uri(case["image"])} if "image" in case else data


def document(stored: str | dict[str, Any]) -> str | dict[str, Any]:
    """A golden document as one of a ranking's ``documents``."""
    if isinstance(stored, str) or "image" not in stored:
        return stored
    return {**stored, "image": image_uri(stored["image"])}


@cache
def image_uri(name: str) -> str:
    """One of the stored images as a data URI."""
    data = (GOLDEN / "images" / name).read_bytes()
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def ask(llm: Any, **data: Any) -> Any:
    """The response's ``data``."""
    return llm.encode({"data": data}, pooling_task="plugin", use_tqdm=False)[0].outputs


def vectors(response: dict[str, Any]) -> list[np.ndarray]:
    """All items of a response, decoded."""
    items: Any = response["embeddings"]
    found: Sequence[dict[str, Any]] = items if isinstance(items, list) else [items]
    return [decoded(item) for item in found]


def run_blobs(llm: Any, task: str, prompts: Sequence[list[int]], blobs: Sequence[bytes | None]) -> list[Any]:
    """What the pooler answers to prompts with these blobs (or none), all given to the engine at once."""
    from vllm import PoolingParams

    params = [
        PoolingParams(task=task, extra_kwargs=None if blob is None else {transport.EXTRA_KWARG: blob})
        for blob in blobs
    ]
    tokens = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.encode(tokens, params, pooling_task=task, use_tqdm=False)
    return [output.outputs.data for output in outputs]


def vectors_together(llm: Any, pipeline: Any, requests: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    """Vectors of requests for one text each, all given to the engine at once."""
    prompts = [pipeline.encode(pipeline.parse(data)).prompts[0] for data in requests]
    blobs = [transport.pack(pipeline.blob_kind, i, prompt.arrays) for i, prompt in enumerate(prompts)]
    return _vectors(run_blobs(llm, pipeline.task, [prompt.token_ids for prompt in prompts], blobs))


def raw_vectors(llm: Any, pipeline: Any, prompts: Sequence[list[int]]) -> list[np.ndarray]:
    """A vector for each token of prompts that no request would write, all given to the engine at once."""
    nothing = np.empty(0, np.int32)
    blobs = [
        transport.pack(pipeline.blob_kind, i, (np.array([Role.VECTORS, 0, len(ids)], np.int64), nothing))
        for i, ids in enumerate(prompts)
    ]
    return _vectors(run_blobs(llm, pipeline.task, prompts, blobs))


def _vectors(answers: Sequence[Any]) -> list[np.ndarray]:
    found = []
    for data in answers:
        blob = transport.unpack(data.numpy().tobytes())
        assert Status(blob.status) is Status.OK
        found.append(blob.arrays[1].reshape(blob.arrays[0].tolist()))
    return found


def assert_refused(llm: Any, pipeline: Any, blobs: Sequence[bytes]) -> None:
    """Blobs that do not fit a prompt of three tokens are refused, beside a request of vLLM's own without any."""
    answers = run_blobs(llm, pipeline.task, [[1, 2, 3]] * (len(blobs) + 1), [None, *blobs])
    statuses = [transport.unpack(data.numpy().tobytes()).status for data in answers[1:]]
    assert statuses == [Status.BAD_BLOB] * len(blobs)
