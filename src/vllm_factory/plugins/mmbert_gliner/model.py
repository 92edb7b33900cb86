"""GLiNER on vLLM's own ModernBERT as a vLLM pooling model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.modernbert import ModernBertModel

from vllm_factory.compat.own_attention import modernbert_attention
from vllm_factory.compat.vllm_api import (
    encoder_only,
    load_model_of_vllm_strictly,
    load_weights_strictly,
    refuse_unsupported,
    with_backbone,
)
from vllm_factory.plugins.mmbert_gliner.config import MmbertGlinerConfig
from vllm_factory.poolers.gliner import gliner_pooler
from vllm_factory.pooling.vllm_adapter import VllmPoolerAdapter
from vllm_factory.pooling.vllm_model import warn_of_reduced_precision


@encoder_only
class MmbertGlinerModel(nn.Module):
    """Hidden states from vLLM's encoder; entity candidates from the pooler."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refuse_unsupported(vllm_config)
        config = MmbertGlinerConfig.from_factory(vllm_config.model_config.hf_config.factory)
        self.backbone = ModernBertModel(
            vllm_config=with_backbone(vllm_config, config.encoder),
            prefix=f"{prefix}.backbone".lstrip("."),
        )
        self.own_attention = modernbert_attention(vllm_config, self.backbone, config.encoder.local_attention)
        self.head = gliner_pooler(config.head, config.encoder.hidden_size)
        self.pooler = VllmPoolerAdapter(self.head)
        warn_of_reduced_precision(vllm_config.model_config.dtype)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` to ``[T, hidden size]`` (part of vLLM's model interface)."""
        return self.backbone.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[T]`` token ids of all requests of the step, to ``[T, hidden size]``."""
        self.own_attention.begin(input_ids)
        return self.backbone(input_ids, positions)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a prepared checkpoint; every tensor must find its parameter and the other way round."""
        backbone, head = [], []
        for name, tensor in weights:
            if name.startswith("backbone."):
                backbone.append((name.removeprefix("backbone."), tensor))
            else:
                head.append((name, tensor))
        loaded = {f"backbone.{name}" for name in load_model_of_vllm_strictly(self.backbone, backbone)}
        loaded |= load_weights_strictly(self.head.named_parameters(prefix="head"), head)
        self.head.prepare()
        return loaded
