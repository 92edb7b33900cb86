"""Turns a GLiNER on DeBERTa into a directory that vLLM serves; see :mod:`vllm_factory.prep.gliner`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from vllm_factory.models.deberta_v2 import DebertaConfig
from vllm_factory.plugins.deberta_gliner.network import DebertaGlinerNetwork
from vllm_factory.prep.common import MAX_TOKENS, Tensors, drop_unused_positions
from vllm_factory.prep.gliner import EncoderPrep, prepare_gliner
from vllm_factory.prep.source import Source
from vllm_factory.registry import plugin


class DebertaPrep(EncoderPrep):
    """See :class:`~vllm_factory.prep.gliner.EncoderPrep`."""

    spec = plugin("deberta_gliner")
    embeddings = "backbone.embeddings.word_embeddings.weight"
    keys = frozenset(field.name for field in fields(DebertaConfig))

    def network(self, factory: Mapping[str, Any]) -> nn.Module:
        return DebertaGlinerNetwork.from_factory(factory)

    def max_tokens(self, config: Any) -> int:
        return int(config.max_position_embeddings) if config.position_biased_input else MAX_TOKENS

    def adapt(self, config: Any, tensors: Tensors) -> None:
        drop_unused_positions(tensors, "backbone.", config.position_biased_input)


def prepare(source: Source, output: Path) -> dict[str, str]:
    """See :func:`~vllm_factory.prep.gliner.prepare_gliner`."""
    return prepare_gliner(source, output, DebertaPrep())
