"""Rotary positions on the CPU, where vLLM's kernel takes flat heads only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class FlatRotary(nn.Module):
    """vLLM's rotary embedding, which gets the heads of a token as one row.

    The kernel of vLLM's CPU builds (0.32 at least) takes ``[T, H, D]`` for tokens of one head, in silence.

    Args:
        rotary: vLLM's layer, which several layers and models may share.
    """

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T]``, and ``[T, H, D]`` or ``[T, H * D]`` twice, to ``[T, H * D]`` twice."""
        rows = positions.shape[0]
        rotated: tuple[torch.Tensor, torch.Tensor] = self.rotary(
            positions, query.reshape(rows, -1), key.reshape(rows, -1)
        )
        return rotated
