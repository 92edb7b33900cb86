"""EmbeddingGemma on vLLM's own Gemma 3 as a vLLM pooling model; checkpoints as sentence-transformers saves them."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.gemma3 import Gemma3Model

from vllm_factory.compat.own_attention import decoder_attention
from vllm_factory.compat.vllm_api import (
    encoder_only,
    load_model_of_vllm_strictly,
    refuse_unsupported,
    with_backbone,
)
from vllm_factory.errors import CheckpointError
from vllm_factory.poolers.dense_stack import load_dense_stack
from vllm_factory.poolers.embedding import embedding_pooler
from vllm_factory.pooling.vllm_adapter import VllmPoolerAdapter
from vllm_factory.pooling.vllm_model import warn_of_reduced_precision
from vllm_factory.published import Published


@encoder_only
class EmbeddingGemmaModel(nn.Module):
    """Hidden states from vLLM's Gemma 3, which looks both ways; one vector a text from the pooler."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refuse_unsupported(vllm_config)
        model = vllm_config.model_config
        self.checkpoint = Published.open(model.model, model.revision)
        self.backbone = Gemma3Model(
            vllm_config=with_backbone(vllm_config, self._both_ways(model.hf_config)),
            prefix=f"{prefix}.backbone".lstrip("."),
        )
        self.own_attention = decoder_attention(vllm_config, self.backbone)
        pooler, self.head = embedding_pooler(self.checkpoint, model.hf_config.hidden_size)
        self.pooler = VllmPoolerAdapter(pooler)
        warn_of_reduced_precision(model.dtype)

    def _both_ways(self, hf_config: Any) -> Any:
        """The configuration by which vLLM attends to both sides: it would set this for its own class alone."""
        if not getattr(hf_config, "use_bidirectional_attention", False):
            raise CheckpointError(
                f"{self.checkpoint.name}: use_bidirectional_attention is not set in config.json; "
                "this plugin serves Gemma 3 that attends to both sides"
            )
        hf_config = deepcopy(hf_config)
        hf_config.is_causal = False
        return hf_config

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
        return self.backbone(input_ids, positions, None)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a published checkpoint; every tensor must find its parameter and the other way round."""
        loaded = {f"backbone.{name}" for name in load_model_of_vllm_strictly(self.backbone, list(weights))}
        # The pooler holds the same modules a second time, under its own names.
        return loaded | {f"head.{name}" for name in load_dense_stack(self.head, self.checkpoint)}
