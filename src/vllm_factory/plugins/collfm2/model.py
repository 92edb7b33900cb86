"""ColLFM2 on vLLM's own LFM2-VL as a vLLM pooling model; checkpoints as published with sauerkrautlm-colpali."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from PIL import Image
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.lfm2_vl import (
    Lfm2VLDummyInputsBuilder,
    Lfm2VLForConditionalGeneration,
    Lfm2VLMultiModalProcessor,
    Lfm2VLProcessingInfo,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_factory.compat.own_attention import decoder_attention, exact_vision_attention
from vllm_factory.compat.rotary import FlatRotary
from vllm_factory.compat.vllm_api import (
    load_model_of_vllm_strictly,
    refuse_other_images,
    refuse_unsupported,
    whole_prompts,
)
from vllm_factory.io.lfm2_vl import Lfm2Images
from vllm_factory.plugins.collfm2.resizing import resizing_in_float
from vllm_factory.poolers.multivector import MultiVectorPooler
from vllm_factory.pooling.vllm_adapter import VllmPoolerAdapter
from vllm_factory.pooling.vllm_model import warn_of_reduced_precision

#: Width of the vectors; the library knows no other.
DIM = 128


class ColLfm2ProcessingInfo(Lfm2VLProcessingInfo):  # type: ignore[misc]
    """How many tiles an image has and how they are numbered: as the io processor counts them.

    vLLM's own always counts a thumbnail, and numbers tiles as later versions of transformers do.
    """

    def get_hf_processor(self, **kwargs: object) -> Any:
        """The checkpoint's processor, resizing as the reference."""
        processor = super().get_hf_processor(**kwargs)
        if not hasattr(processor, "resizes_in_float"):
            processor.image_processor = resizing_in_float(processor.image_processor)
            # vLLM keeps the processor and hands it out again.
            processor.resizes_in_float = True
        return processor

    def get_num_patches(
        self, *, image_width: int, image_height: int, processor: Any, mm_kwargs: Mapping[str, object]
    ) -> int:
        """Pictures that one image becomes."""
        return Lfm2Images.of(processor.image_processor).images(image_width, image_height)

    def get_image_repl(self, image_width: int, image_height: int, processor: Any, **_: object) -> str:
        """The tokens that one image becomes."""
        blank = Image.new("1", (image_width, image_height))
        return "".join(text for text, _ in Lfm2Images.of(processor.image_processor).pieces(blank))


@whole_prompts
@MULTIMODAL_REGISTRY.register_processor(
    Lfm2VLMultiModalProcessor, info=ColLfm2ProcessingInfo, dummy_inputs=Lfm2VLDummyInputsBuilder
)
class ColLfm2Model(Lfm2VLForConditionalGeneration):  # type: ignore[misc]
    """Hidden states from vLLM's LFM2-VL; projection, vectors and scores from the pooler."""

    is_pooling_model = True

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "base_model.": "",
            "model.language_model.": "language_model.model.",
            "model.vision_tower.vision_model.": "vision_tower.vision_model.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "model.custom_text_proj.": "custom_text_proj.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        for name in ("conv_dim", "block_dim"):
            # Left out by newer transformers, where they are the hidden size; vLLM reads them.
            if not hasattr(config.text_config, name):
                setattr(config.text_config, name, config.text_config.hidden_size)
        exact_vision_attention(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        refuse_unsupported(vllm_config)
        refuse_other_images(vllm_config)
        # Nothing is generated.
        del self.language_model.lm_head
        for layer in self.language_model.model.layers:
            if hasattr(layer, "self_attn"):
                layer.self_attn.rotary_emb = FlatRotary(layer.self_attn.rotary_emb)
        self.own_attention = decoder_attention(vllm_config, self.language_model.model)
        self.custom_text_proj = nn.Linear(config.text_config.hidden_size, DIM)
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
