"""An attention of ours in the place of vLLM's, inside a model class of vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_factory.models.hidden_keys import HiddenKeys


class Step:
    """What all layers of a model must know of the forward pass that is running."""

    def __init__(self) -> None:
        self.hidden: HiddenKeys | None = None


class HiddenKeysAttention(nn.Module):
    """vLLM's attention, but for the sequences that :class:`~vllm_factory.models.hidden_keys.HiddenKeys` takes.

    Args:
        attention: vLLM's layer; it keeps its place in vLLM's list of layers.
        step: Shared with the model.
        window: Greatest distance at which tokens see each other; ``None`` for any.
    """

    def __init__(self, attention: Any, step: Step, window: int | None) -> None:
        super().__init__()
        self.attention = attention
        self.step = step
        self.window = window
        self.num_heads, self.head_size = attention.num_heads, attention.head_size
        self.scale = attention.impl.scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``[T, H * D]`` each, to ``[T, H * D]``."""
        hidden = self.step.hidden
        if hidden is None:
            return self.attention(query, key, value)
        split = [x.view(-1, self.num_heads, self.head_size) for x in (query, key, value)]
        context = hidden.attend(split[0], split[1], split[2], scale=self.scale, window=self.window)
        if hidden.rows is None:
            return context
        output = self.attention(query, key, value)
        output[hidden.rows] = context
        return output


def run_eagerly(model: Any) -> None:
    """Keep vLLM from compiling a model class of its own that now holds layers of ours."""
    model.do_not_compile = True
