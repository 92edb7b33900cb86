"""GLiNER2 on DeBERTa as a vLLM pooling model."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_factory.compat.attention import SequenceBoundaries
from vllm_factory.compat.vllm_api import encoder_only, load_weights_strictly, refuse_unsupported
from vllm_factory.plugins.deberta_gliner2.config import DebertaGliner2Config
from vllm_factory.plugins.deberta_gliner2.network import DebertaGliner2Network
from vllm_factory.pooling.vllm_adapter import VllmPoolerAdapter

logger = logging.getLogger(__name__)


@encoder_only
class DebertaGliner2Model(nn.Module):
    """Hidden states from the encoder; classes, counts and candidates from the pooler."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refuse_unsupported(vllm_config)
        self.config = DebertaGliner2Config.from_hf(vllm_config.model_config.hf_config)
        self.max_model_len = vllm_config.model_config.max_model_len
        self.network = DebertaGliner2Network(self.config)
        self.boundaries = SequenceBoundaries(vllm_config, f"{prefix}.boundaries".lstrip("."))
        self.pooler = VllmPoolerAdapter(self.network.head)
        dtype = vllm_config.model_config.dtype
        if dtype != torch.float32:
            logger.warning(
                "Running in %s: scores differ from the float32 reference in the second or third digit; "
                "start with --dtype float32 for equal ones.",
                dtype,
            )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` to ``[T, embedding size]`` (part of vLLM's model interface)."""
        return self.network.backbone.embeddings.word_embeddings(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[T]`` token ids of all requests of the step, to ``[T, hidden size]``."""
        varlen = self.boundaries.varlen(input_ids.shape[0], input_ids.device)
        return self.network.encode(input_ids, positions, varlen)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a prepared checkpoint; every tensor must find its parameter and the other way round."""
        loaded = load_weights_strictly(self.network.named_parameters(), weights)
        self.network.prepare(self.max_model_len)
        return {f"network.{name}" for name in loaded}
