"""ColQwen3 on vLLM's own Qwen3-VL as a vLLM pooling model; checkpoints as sauerkrautlm-colpali saves them."""

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
    load_model_of_vllm_strictly,
    refuse_other_images,
    refuse_unsupported,
    whole_prompts,
)
from vllm_factory.poolers.multivector import MultiVectorPooler
from vllm_factory.pooling.vllm_adapter import VllmPoolerAdapter
from vllm_factory.pooling.vllm_model import warn_of_reduced_precision

#: Width of the vectors where ``config.json`` does not say, as the library has it.
DEFAULT_DIM = 128


@whole_prompts
@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLMultiModalProcessor, info=ImagesOnly, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class ColQwen3Model(Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """Hidden states from vLLM's Qwen3-VL; projection, vectors and scores from the pooler.

    vLLM's own ``ColQwen3Model`` is for other publishers' checkpoints: it has no bias where ``dim`` is given.
    """

    is_pooling_model = True

    # In turn: what a rule has renamed, the next ones leave alone.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "language_model.": "language_model.model.",
            "model.language_model.": "language_model.model.",
            "model.visual.": "visual.",
            "model.custom_text_proj.": "custom_text_proj.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        exact_vision_attention(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        refuse_unsupported(vllm_config)
        refuse_other_images(vllm_config)
        config = vllm_config.model_config.hf_config
        # Nothing is generated, and checkpoints hold no such weights.
        del self.language_model.lm_head
        self.own_attention = decoder_attention(vllm_config, self.language_model.model)
        width = getattr(config, "dim", None) or DEFAULT_DIM
        self.custom_text_proj = nn.Linear(config.text_config.hidden_size, width)
        self.pooler = VllmPoolerAdapter(MultiVectorPooler(self.custom_text_proj))
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
