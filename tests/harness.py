"""Running a prepared checkpoint without vLLM: the same pipeline, network and pooler, fed by hand."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file

from vllm_factory.io.gliner import GlinerPipeline
from vllm_factory.io.limits import Limits
from vllm_factory.io.linker import LinkerPipeline
from vllm_factory.io.pipeline import Prompt
from vllm_factory.io.rerank import RerankPipeline
from vllm_factory.io.tokens import LABELS_TOKENIZER, LabelTokenizer, WordTokenizer
from vllm_factory.poolers.gliner_config import GlinerConfig
from vllm_factory.pooling.protocol import PoolerResult, Status
from vllm_factory.prep.cli import prepare
from vllm_factory.registry import plugin
from vllm_factory.varlen import Varlen


def prepared_pipeline(path: Path, max_tokens: int | None = None, limits: Limits | None = None) -> GlinerPipeline:
    """The pipeline of a prepared directory; ``max_tokens`` as in :class:`LocalEngine`."""
    hf_config = json.loads((path / "config.json").read_text())
    factory = hf_config["factory"]
    head = GlinerConfig.from_dict(factory["head"])
    common: dict[str, Any] = {
        "max_tokens": max_tokens or hf_config["max_position_embeddings"],
        "tokenizer_max_length": factory["tokenizer_max_length"],
        "limits": limits or Limits(),
    }
    if "labels" in factory:
        labels = factory["labels"]
        return LinkerPipeline(
            head,
            WordTokenizer(path / "tokenizer.json"),
            LabelTokenizer(path / LABELS_TOKENIZER / "tokenizer.json", labels["tokenizer_max_length"]),
            max_label_tokens=labels["max_tokens"],
            **common,
        )
    kind = RerankPipeline if factory["plugin"] == "modernbert_gliner_rerank" else GlinerPipeline
    return kind(head, WordTokenizer(path / "tokenizer.json", known=head.ent_token), **common)


def answer_together(
    pipeline: GlinerPipeline,
    requests: Sequence[dict[str, Any]],
    run: Callable[[list[Prompt]], Sequence[Sequence[np.ndarray]]],
) -> list[Any]:
    """Responses to requests whose prompts are given to ``run`` at once; it returns the pooler's arrays of each."""
    encoded = [pipeline.encode(pipeline.parse(data)) for data in requests]
    results = run([prompt for item in encoded for prompt in item.prompts])
    answers = []
    for item in encoded:
        own, results = results[: len(item.prompts)], results[len(item.prompts) :]
        tokens = sum(len(prompt.token_ids) for prompt in item.prompts)
        answers.append(pipeline.decode(item.state, own, tokens))
    return answers


#: How far a float32 score may move with the batch around its request: padded shapes round differently.
BATCH_TOLERANCE = 5e-5


class LocalEngine:
    """A prepared GLiNER checkpoint in this process, for every plugin that has a network of plain torch.

    Args:
        path: The prepared directory.
        max_tokens: What vLLM's ``max_model_len`` would be.
        limits: Bounds on requests.
    """

    def __init__(self, path: Path, max_tokens: int | None = None, limits: Limits | None = None) -> None:
        factory = json.loads((path / "config.json").read_text())["factory"]
        network_class = plugin(factory["plugin"]).network_class
        assert network_class is not None, "the backbone is vLLM's: tests of this plugin need an engine"
        self.pipeline: Any = self.read_pipeline(path, max_tokens, limits)
        self.max_tokens = self.pipeline.max_tokens
        self.network = resolve_name(network_class).from_factory(factory).eval()
        self.network.load_state_dict(load_file(path / "model.safetensors"), strict=True)
        self.network.prepare(self.max_tokens)

    def read_pipeline(self, path: Path, max_tokens: int | None, limits: Limits | None) -> Any:
        """The pipeline of the prepared directory."""
        return prepared_pipeline(path, max_tokens, limits)

    @torch.inference_mode()
    def run(self, prompts: Sequence[Prompt]) -> list[PoolerResult]:
        """All prompts as one engine step."""
        lengths = [len(prompt.token_ids) for prompt in prompts]
        assert max(lengths) <= self.max_tokens
        device = next(self.network.parameters()).device
        ids = torch.tensor([token for prompt in prompts for token in prompt.token_ids], device=device)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        hidden = self.network.encode(ids, positions, Varlen(lengths, ids.device))
        requests = [
            self.network.head.parse(prompt.arrays, length) for prompt, length in zip(prompts, lengths, strict=True)
        ]
        return self.network.head.pool(hidden, (np.cumsum(lengths) - lengths).tolist(), requests)

    def answer_together(self, requests: Sequence[dict[str, Any]]) -> list[Any]:
        """Responses to requests whose prompts all share one step."""
        return answer_together(self.pipeline, requests, self._arrays)

    def _arrays(self, prompts: list[Prompt]) -> list[Sequence[np.ndarray]]:
        results = self.run(prompts)
        assert all(result.status is Status.OK for result in results), [r.status for r in results]
        return [result.arrays for result in results]

    def answer(self, **data: Any) -> Any:
        """The response to one request alone."""
        return self.answer_together([data])[0]


class CheckpointLibrary(ABC):
    """Checkpoints by recipe name: as saved, as prepared, in the library, and in a local engine."""

    engine_class: ClassVar[type[LocalEngine]] = LocalEngine

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @abstractmethod
    def build(self, name: str) -> Path:
        """Have the reference library write the checkpoint."""

    @abstractmethod
    def load(self, path: Path) -> Any:
        """Load a checkpoint in the reference library."""

    @cache  # noqa: B019 (one instance a session)
    def saved(self, name: str) -> Path:
        """Directory that the reference library wrote."""
        return self.build(name)

    @cache  # noqa: B019
    def prepared(self, name: str) -> Path:
        """Directory that vllm-factory-prep wrote."""
        output = self.directory / f"{name}-prepared"
        prepare(str(self.saved(name)), output)
        return output

    @cache  # noqa: B019
    def reference(self, name: str) -> Any:
        """The checkpoint in the reference library."""
        return self.load(self.saved(name))

    @cache  # noqa: B019
    def local(self, name: str) -> Any:
        """The checkpoint in this package, without vLLM."""
        return self.engine_class(self.prepared(name))


def assert_same_entities(
    got: Sequence[dict[str, Any]], want: Sequence[dict[str, Any]], tolerance: float = 1e-4
) -> None:
    """The same entities with the same scores.

    Compared as sets: entities that start together come by score, and scores that differ by rounding alone may
    come in either order.
    """

    def key(found: dict[str, Any]) -> tuple[Any, ...]:
        return (found["start"], found["end"], found["label"], found["text"])

    got, want = sorted(got, key=key), sorted(want, key=key)
    assert list(map(key, got)) == list(map(key, want))
    np.testing.assert_allclose([e["score"] for e in got], [e["score"] for e in want], atol=tolerance, rtol=0)
