"""Turns a GLiNER on DeBERTa into a directory that vLLM serves; see :mod:`vllm_factory.prep.gliner`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm_factory.models.deberta_v2 import DebertaConfig
from vllm_factory.plugins.deberta_gliner.network import DebertaGlinerNetwork
from vllm_factory.prep.gliner import MAX_TOKENS, Encoder, Tensors, prepare_gliner
from vllm_factory.prep.source import Source
from vllm_factory.registry import plugin


def prepare(source: Source, output: Path) -> dict[str, str]:
    """See :func:`~vllm_factory.prep.gliner.prepare_gliner`."""
    return prepare_gliner(source, output, ENCODER)


def _max_tokens(config: Any) -> int:
    return int(config.max_position_embeddings) if config.position_biased_input else MAX_TOKENS


def _adapt(config: Any, tensors: Tensors) -> None:
    if not config.position_biased_input:
        tensors.pop("backbone.embeddings.position_embeddings.weight", None)  # saved by some, used by none


ENCODER = Encoder(
    spec=plugin("deberta_gliner"),
    network=DebertaGlinerNetwork.from_factory,
    embeddings="backbone.embeddings.word_embeddings.weight",
    keys=frozenset(field.name for field in fields(DebertaConfig)),
    max_tokens=_max_tokens,
    adapt=_adapt,
)
