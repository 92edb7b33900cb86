"""Turns a GLiNER on ModernBERT or mmBERT into a directory that vLLM serves; see :mod:`vllm_factory.prep.gliner`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vllm_factory.plugins.mmbert_gliner.network import MmbertGlinerLayout
from vllm_factory.prep.gliner import EncoderPrep, prepare_gliner
from vllm_factory.prep.source import Source
from vllm_factory.registry import plugin


class ModernBertPrep(EncoderPrep):
    """See :class:`~vllm_factory.prep.gliner.EncoderPrep`."""

    spec = plugin("mmbert_gliner")
    embeddings = "backbone.embeddings.tok_embeddings.weight"
    keys = frozenset(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "hidden_activation",
            "max_position_embeddings",
            "norm_eps",
            "norm_bias",
            "attention_bias",
            "mlp_bias",
            "layer_types",
            "rope_parameters",
            "local_attention",
            # Checked against the vocabulary by transformers.
            "pad_token_id",
            "bos_token_id",
            "eos_token_id",
            "cls_token_id",
            "sep_token_id",
        )
    )
    unsupported: Mapping[str, str] = {
        "fuse_layers": "a weighted sum of all layers, of which vLLM's ModernBERT returns the last only"
    }

    def network(self, factory: Mapping[str, Any]) -> nn.Module:
        return MmbertGlinerLayout.from_factory(factory)

    def max_tokens(self, config: Any) -> int:
        return int(config.max_position_embeddings)


def prepare(source: Source, output: Path) -> dict[str, str]:
    """See :func:`~vllm_factory.prep.gliner.prepare_gliner`."""
    return prepare_gliner(source, output, ModernBertPrep())
