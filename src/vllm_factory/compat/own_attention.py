"""An attention of ours in the place of vLLM's, inside a model class of vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_factory.models.hidden_keys import HiddenKeys


class Step:
    """What all layers of a model must know of the forward pass that is running."""

    def __init__(self) -> None:
        self.hidden: HiddenKeys | None = None
        self.visible: torch.Tensor | None = None

    def hide(self, hidden: HiddenKeys | None, ids: torch.Tensor) -> None:
        """What the layers must know of the pass over ``ids``, ``[T]``, with convolutions among the layers."""
        self.hidden = hidden
        self.visible = None if hidden is None else hidden.visible(ids.shape[0]).unsqueeze(-1)


class HiddenKeysAttention(nn.Module):
    """vLLM's attention, but for the sequences that :class:`~vllm_factory.models.hidden_keys.HiddenKeys` takes.

    Args:
        attention: vLLM's layer; it keeps its place in vLLM's list of layers.
        step: Shared with the model.
        window: Greatest distance at which tokens see each other; ``None`` for any.
        causal: Whether tokens see none behind them.
    """

    def __init__(self, attention: Any, step: Step, window: int | None, *, causal: bool = False) -> None:
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


def take_over_modernbert(model: Any, local_attention: int) -> Step:
    """Put our attention into every layer of vLLM's ModernBERT, which then runs as it is written, uncompiled.

    Args:
        model: vLLM's ``ModernBertModel``.
        local_attention: Width of the local layers' window.

    Returns:
        What each forward pass tells the layers. While ``hidden`` is ``None``, vLLM's attention runs.
    """
    step = Step()
    for layer in model.encoder_layer.layers:
        attention = layer.attn.attn
        local = attention.sliding_window is not None
        layer.attn.attn = HiddenKeysAttention(attention, step, local_attention // 2 if local else None)
    model.do_not_compile = True
    return step


def take_over_lfm2(model: Any) -> Step:
    """Put our attention into vLLM's LFM2, as :func:`take_over_modernbert` does.

    To its convolutions, tokens that nobody sees become zeros.
    """
    step = Step()

    def without_hidden(_: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        hidden_states, output = inputs
        return (hidden_states if step.visible is None else hidden_states * step.visible, output)

    for layer in model.layers:
        if hasattr(layer, "short_conv"):
            layer.short_conv.register_forward_pre_hook(without_hidden)
        else:
            layer.self_attn.attn = HiddenKeysAttention(layer.self_attn.attn, step, None, causal=True)
    model.do_not_compile = True
    return step


def inexact_on_this_device(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's own attention rounds more than the model's dtype: in float32, on GPUs."""
    on_cpu = vllm_config.device_config.device_type == "cpu"
    return bool(vllm_config.model_config.dtype == torch.float32 and not on_cpu)
