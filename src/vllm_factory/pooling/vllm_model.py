"""The vLLM pooling model around a network of ours: encoder and head as one plain torch module."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_factory.compat.attention import SequenceBoundaries
from vllm_factory.compat.vllm_api import load_weights_strictly, refuse_unsupported
from vllm_factory.models.backbone import Network
from vllm_factory.pooling.vllm_adapter import VllmPoolerAdapter

logger = logging.getLogger(__name__)


class NetworkModel(nn.Module):
    """Hidden states from the encoder; results from the pooler. Plugins say which network."""

    is_pooling_model = True
    network_class: ClassVar[type[Network]]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refuse_unsupported(vllm_config)
        model = vllm_config.model_config
        self.max_model_len = model.max_model_len
        self.network = self.network_class.from_factory(model.hf_config.factory)
        self.boundaries = SequenceBoundaries(vllm_config, f"{prefix}.boundaries".lstrip("."))
        self.pooler = VllmPoolerAdapter(self.network.head)
        warn_of_reduced_precision(model.dtype)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` to ``[T, embedding size]`` (part of vLLM's model interface)."""
        return self.network.backbone.embed_input_ids(input_ids)

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


def warn_of_reduced_precision(dtype: torch.dtype) -> None:
    """Say once, at start, that scores will not be the float32 reference's."""
    if dtype != torch.float32:
        logger.warning(
            "Running in %s: scores differ from the float32 reference in the second or third digit; "
            "start with --dtype float32 for equal ones.",
            dtype,
        )
