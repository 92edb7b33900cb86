"""Nemotron ColEmbed on vLLM's own Qwen3-VL as a vLLM pooling model; checkpoints as published."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_factory.compat.own_attention import decoder_attention, exact_vision_attention
from vllm_factory.compat.qwen_vl import ImagesOnly
from vllm_factory.compat.vllm_api import (
    encoder_only,
    load_model_of_vllm_strictly,
    refuse_other_images,
    refuse_unsupported,
)
from vllm_factory.errors import CheckpointError
from vllm_factory.poolers.multivector import MultiVectorPooler
from vllm_factory.pooling.vllm_adapter import VllmPoolerAdapter
from vllm_factory.pooling.vllm_model import warn_of_reduced_precision


class _Sum(nn.Module):
    """In the place of the last normalisation, which the published model skips. Checkpoints hold its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return states + residual, residual


@encoder_only
@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLMultiModalProcessor, info=ImagesOnly, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class NemotronColEmbedModel(Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """Hidden states of the last layer from vLLM's Qwen3-VL, which looks both ways; vectors from the pooler.

    vLLM's own class for these checkpoints attends to one side and normalises once more than the published model.
    """

    is_pooling_model = True

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "lm_head.": None,
            "model.visual.": "visual.",
            "model.language_model.": "language_model.model.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        pooling = getattr(config, "pooling", None) or "colbert"
        if pooling != "colbert":
            raise CheckpointError(f"pooling is {pooling!r} in config.json; this plugin serves 'colbert'")
        config.text_config.is_causal = False
        exact_vision_attention(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        refuse_unsupported(vllm_config)
        refuse_other_images(vllm_config)
        # Nothing is generated.
        del self.language_model.lm_head
        self.own_attention = decoder_attention(vllm_config, self.language_model.model)
        self.language_model.model.norm = _Sum(config.text_config.hidden_size)
        self.pooler = VllmPoolerAdapter(MultiVectorPooler(nn.Identity()))
        warn_of_reduced_precision(vllm_config.model_config.dtype)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """``[T]`` token ids of all requests of the step, or their embeddings, to ``[T, hidden size]``."""
        self.own_attention.begin(input_ids, inputs_embeds)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a published checkpoint; every tensor must find its parameter and the other way round."""
        return load_model_of_vllm_strictly(self, list(weights), super().load_weights)

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        """Never: there is no head for it."""
        raise NotImplementedError
