"""Turns a GLiNER on T5 or mT5 into a directory that vLLM serves; see :mod:`vllm_factory.prep.gliner`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_factory.errors import CheckpointError
from vllm_factory.models.t5_encoder import T5EncoderConfig
from vllm_factory.plugins.mt5_gliner.network import Mt5GlinerNetwork
from vllm_factory.prep.common import Tensors
from vllm_factory.prep.gliner import EncoderPrep, prepare_gliner
from vllm_factory.prep.source import Source
from vllm_factory.registry import plugin

#: The encoder's embeddings, and the name under which the full T5 shares them with the decoder.
OWN_EMBEDDINGS = "backbone.encoder.embed_tokens.weight"
SHARED_EMBEDDINGS = "backbone.shared.weight"


class T5Prep(EncoderPrep):
    """See :class:`~vllm_factory.prep.gliner.EncoderPrep`."""

    spec = plugin("mt5_gliner")
    embeddings = SHARED_EMBEDDINGS
    keys = frozenset(field.name for field in fields(T5EncoderConfig))

    def network(self, factory: Mapping[str, Any]) -> nn.Module:
        return Mt5GlinerNetwork.from_factory(factory)

    def adapt(self, config: Any, tensors: Tensors) -> None:
        """Keep the embeddings once: the library saves either name, or both with equal values."""
        own = tensors.pop(OWN_EMBEDDINGS, None)
        if own is None:
            return
        shared = tensors.setdefault(SHARED_EMBEDDINGS, own)
        if not torch.equal(shared, own):
            raise CheckpointError("encoder.embed_tokens.weight and shared.weight differ; T5 ties them")


def prepare(source: Source, output: Path) -> dict[str, str]:
    """See :func:`~vllm_factory.prep.gliner.prepare_gliner`."""
    return prepare_gliner(source, output, T5Prep())
