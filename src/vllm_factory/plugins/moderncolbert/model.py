"""ColBERT on vLLM's own ModernBERT as a vLLM pooling model; checkpoints as PyLate saves them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.modernbert import ModernBertModel

from vllm_factory.compat.own_attention import modernbert_attention
from vllm_factory.compat.vllm_api import encoder_only, load_model_of_vllm_strictly, refuse_unsupported
from vllm_factory.io.colbert import ColbertSettings, Expansion
from vllm_factory.poolers.dense_stack import dense_stack, load_dense_stack
from vllm_factory.poolers.multivector import MultiVectorPooler
from vllm_factory.pooling.vllm_adapter import VllmPoolerAdapter
from vllm_factory.pooling.vllm_model import warn_of_reduced_precision
from vllm_factory.published import Published


@encoder_only
class ModernColbertModel(nn.Module):
    """Hidden states from vLLM's encoder; vectors and scores from the pooler."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refuse_unsupported(vllm_config)
        model = vllm_config.model_config
        self.checkpoint = Published.open(model.model, model.revision)
        settings = ColbertSettings.read(self.checkpoint)
        self.backbone = ModernBertModel(vllm_config=vllm_config, prefix=f"{prefix}.backbone".lstrip("."))
        self.head = dense_stack(self.checkpoint, model.hf_config.hidden_size)
        self.pooler = VllmPoolerAdapter(MultiVectorPooler(self.head))
        self.own_attention = modernbert_attention(
            vllm_config,
            self.backbone,
            model.hf_config.local_attention,
            Expansion.hidden_by(self.checkpoint, settings),
            settings.query_length,
        )
        warn_of_reduced_precision(model.dtype)

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
        """Load a published checkpoint; every tensor must find its parameter and the other way round."""
        loaded = {f"backbone.{name}" for name in load_model_of_vllm_strictly(self.backbone, list(weights))}
        # The pooler holds the same modules a second time, under its own names.
        return loaded | {f"head.{name}" for name in load_dense_stack(self.head, self.checkpoint)}
