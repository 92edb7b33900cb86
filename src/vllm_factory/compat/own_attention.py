"""An attention of ours in the place of vLLM's, inside a model class of vLLM's.

For what vLLM's kernels cannot do, which is to hide some tokens from all others; for what they do too coarsely: in
float32 on GPUs they multiply in TF32; and for heads of sizes that they do not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_factory.compat.attention import note_boundaries, noted_boundaries
from vllm_factory.io.colbert import Expansion
from vllm_factory.models.hidden_keys import HiddenKeys, hidden_keys


class Step:
    """What all layers of a model must know of the forward pass that is running."""

    def __init__(self) -> None:
        self.hidden: HiddenKeys | None = None
        self.visible: torch.Tensor | None = None


class HiddenKeysAttention(nn.Module):
    """vLLM's attention, but for the sequences that :class:`~vllm_factory.models.hidden_keys.HiddenKeys` takes.

    Args:
        attention: vLLM's layer; it keeps its place in vLLM's list of layers.
        step: Shared with the model.
        window: Greatest distance at which tokens see each other; ``None`` for any.
        causal: Whether tokens see none behind them.
    """

    def __init__(self, attention: Any, step: Step, window: int | None, *, causal: bool) -> None:
        super().__init__()
        self.attention = attention
        self.step = step
        self.window = window
        self.causal = causal
        self.num_heads, self.head_size = attention.num_heads, attention.head_size
        self.scale = attention.impl.scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``[T, H * D]``, keys and values maybe of fewer heads, to ``[T, H * D]``."""
        hidden = self.step.hidden
        if hidden is None:
            return self.attention(query, key, value)
        q, k, v = (x.view(x.shape[0], -1, self.head_size) for x in (query, key, value))
        context = hidden.attend(q, k, v, scale=self.scale, window=self.window, causal=self.causal)
        if hidden.rows is None:
            return context
        output = self.attention(query, key, value)
        output[hidden.rows] = context
        return output


class OwnAttention(nn.Module):
    """Our attention in every layer of a model class of vLLM's, which then runs as it is written, uncompiled.

    Nothing changes where no tokens are hidden and vLLM's attention is exact and takes heads of this size.

    Args:
        vllm_config: vLLM's configuration.
        backbone: What vLLM would compile.
        holders: The modules of ``backbone`` whose ``attn`` is vLLM's attention.
        convolutions: Modules whose first input is a tensor of hidden states, to which hidden tokens are zeros.
        window: From vLLM's layer to the greatest distance at which tokens see each other.
        expansion: How to know the tokens that nobody sees; ``None`` when all are seen.
        query_length: To which queries are filled up with them.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        backbone: Any,
        holders: Sequence[Any],
        convolutions: Iterable[nn.Module] = (),
        window: Callable[[Any], int | None] = lambda _: None,
        expansion: Expansion | None = None,
        query_length: int = 0,
    ) -> None:
        super().__init__()
        self.expansion = expansion
        self.query_length = query_length
        refused = not all(takes_head_size(holder.attn) for holder in holders)
        self.everything = refused or inexact_on_this_device(vllm_config)
        self.used = self.everything or expansion is not None
        if not self.used:
            return
        self.step = Step()
        self.max_model_len = vllm_config.model_config.max_model_len
        layers = []
        for holder in holders:
            layers.append(holder.attn)
            causal = holder.attn.attn_type == AttentionType.DECODER
            holder.attn = HiddenKeysAttention(holder.attn, self.step, window(holder.attn), causal=causal)
        for convolution in convolutions:
            convolution.register_forward_pre_hook(self._without_hidden)
        note_boundaries(layers, alone=refused)
        # In a list, for it is no module of this one: it has its place in the model.
        self.noting = layers[:1]
        backbone.do_not_compile = True

    def begin(self, ids: torch.Tensor | None, embeddings: torch.Tensor | None = None) -> None:
        """Tell the layers of the forward pass that follows.

        Args:
            ids: ``[T]`` token ids of all sequences of the step.
            embeddings: ``[T, hidden size]`` in their place.
        """
        if not self.used:
            return
        tokens = ids if embeddings is None else embeddings
        assert tokens is not None
        varlen = noted_boundaries(self.noting[0], tokens.shape[0], self.max_model_len, tokens.device)
        self.step.hidden, self.step.visible = self._hidden(ids, tokens, varlen), None
        if self.expansion is not None and self.step.hidden is not None:
            self.step.visible = self.step.hidden.visible(tokens.shape[0]).unsqueeze(-1)

    def _hidden(self, ids: torch.Tensor | None, tokens: torch.Tensor, varlen: Any) -> HiddenKeys | None:
        if self.expansion is None:
            return HiddenKeys(None, varlen, torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device))
        assert ids is not None
        return hidden_keys(
            ids,
            varlen,
            token=self.expansion.token,
            spared=self.expansion.spared,
            length=self.query_length,
            everything=self.everything,
        )

    def _without_hidden(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        states, *rest = inputs
        return (states if self.step.visible is None else states * self.step.visible, *rest)


def modernbert_attention(
    vllm_config: VllmConfig,
    model: Any,
    local_attention: int,
    expansion: Expansion | None = None,
    query_length: int = 0,
) -> OwnAttention:
    """:class:`OwnAttention` for vLLM's ``ModernBertModel``.

    Args:
        vllm_config, expansion, query_length: As there.
        model: The model.
        local_attention: Width of the local layers' window.
    """
    return OwnAttention(
        vllm_config,
        backbone=model,
        holders=[layer.attn for layer in model.encoder_layer.layers],
        window=lambda attention: None if attention.sliding_window is None else local_attention // 2,
        expansion=expansion,
        query_length=query_length,
    )


def decoder_attention(
    vllm_config: VllmConfig,
    model: Any,
    expansion: Expansion | None = None,
    query_length: int = 0,
) -> OwnAttention:
    """:class:`OwnAttention` for vLLM's decoders: LFM2, Qwen3 and Gemma 3, looking back or both ways.

    Args:
        vllm_config, expansion, query_length: As there.
        model: The model around its ``layers``.
    """
    return OwnAttention(
        vllm_config,
        backbone=model,
        holders=[layer.self_attn for layer in model.layers if hasattr(layer, "self_attn")],
        convolutions=[layer.short_conv for layer in model.layers if hasattr(layer, "short_conv")],
        # vLLM counts the token itself.
        window=lambda attention: None if attention.sliding_window is None else attention.sliding_window - 1,
        expansion=expansion,
        query_length=query_length,
    )


def inexact_on_this_device(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's own attention rounds more than the model's dtype: in float32, on GPUs."""
    on_cpu = vllm_config.device_config.device_type == "cpu"
    return bool(vllm_config.model_config.dtype == torch.float32 and not on_cpu)


def takes_head_size(attention: Any) -> bool:
    """Whether a layer of vLLM's can run with heads of its size; on CPUs it is built all the same."""
    return bool(attention.attn_backend.supports_head_size(attention.head_size))


def exact_vision_attention(vllm_config: VllmConfig) -> None:
    """Choose torch's attention for a vision tower that is about to be built, where vLLM's own choice is inexact.

    Args:
        vllm_config: vLLM's configuration; ``--mm-encoder-attn-backend`` in it stays.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if inexact_on_this_device(vllm_config) and multimodal.mm_encoder_attn_backend is None:
        multimodal.mm_encoder_attn_backend = AttentionBackendEnum.TORCH_SDPA
