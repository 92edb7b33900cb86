"""ColBERT on vLLM's own LFM2 as a vLLM pooling model; checkpoints as PyLate saves them.

LFM2 looks back only: with short convolutions, whose last inputs vLLM keeps as a state, and with attention over a
key-value cache. Every prompt is read in one step, so neither is ever continued; what a request finds in its blocks
is never read.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.lfm2 import Lfm2ForCausalLM, Lfm2Model

from vllm_factory.compat.own_attention import decoder_attention
from vllm_factory.compat.rotary import FlatRotary
from vllm_factory.compat.vllm_api import (
    encoder_only,
    load_model_of_vllm_strictly,
    refuse_unsupported,
    with_backbone,
)
from vllm_factory.io.colbert import ColbertSettings, Expansion
from vllm_factory.poolers.dense_stack import dense_stack, load_dense_stack
from vllm_factory.poolers.multivector import MultiVectorPooler
from vllm_factory.pooling.vllm_adapter import VllmPoolerAdapter
from vllm_factory.pooling.vllm_model import warn_of_reduced_precision
from vllm_factory.published import Published


def _complete(hf_config: Any) -> Any:
    """The configuration with what vLLM reads and only some published files hold: widths that are one width."""
    complete = deepcopy(hf_config)
    for name in ("conv_dim", "block_dim"):
        if getattr(complete, name, None) is None:
            setattr(complete, name, complete.hidden_size)
    return complete


# Not for its direction, which is back only: by this vLLM reads each prompt in one step and caches no prefixes.
@encoder_only
class Lfm2ColbertModel(nn.Module):
    """Hidden states from vLLM's LFM2; vectors and scores from the pooler."""

    is_pooling_model = True
    # What vLLM asks of a model whose layers keep states.
    is_hybrid = True
    has_inner_state = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refuse_unsupported(vllm_config)
        model = vllm_config.model_config
        self.checkpoint = Published.open(model.model, model.revision)
        settings = ColbertSettings.read(self.checkpoint)
        self.backbone = Lfm2Model(
            vllm_config=with_backbone(vllm_config, _complete(model.hf_config)),
            prefix=f"{prefix}.backbone".lstrip("."),
        )
        for layer in self.backbone.layers:
            if hasattr(layer, "self_attn"):
                layer.self_attn.rotary_emb = FlatRotary(layer.self_attn.rotary_emb)
        self.head = dense_stack(self.checkpoint, model.hf_config.hidden_size)
        self.pooler = VllmPoolerAdapter(MultiVectorPooler(self.head))
        self.own_attention = decoder_attention(
            vllm_config,
            self.backbone,
            Expansion.hidden_by(self.checkpoint, settings),
            settings.query_length,
        )
        warn_of_reduced_precision(model.dtype)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Shape of a convolution's state (part of vLLM's model interface)."""
        complete = with_backbone(vllm_config, _complete(vllm_config.model_config.hf_config))
        return Lfm2ForCausalLM.get_mamba_state_shape_from_config(complete)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Type of a convolution's state (part of vLLM's model interface)."""
        return Lfm2ForCausalLM.get_mamba_state_dtype_from_config(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """How vLLM copies states (part of its model interface)."""
        return Lfm2ForCausalLM.get_mamba_state_copy_func()

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
