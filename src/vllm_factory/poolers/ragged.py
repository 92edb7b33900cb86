"""Ragged lists as padded tables, and neighbours of similar size as groups of bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def runs(sizes: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Neighbours ``first:last`` whose number times largest size is within ``budget``; or one alone."""
    found: list[tuple[int, int]] = []
    first, largest = 0, 0
    for index, size in enumerate(sizes):
        if index > first and (index - first + 1) * max(largest, size) > budget:
            found.append((first, index))
            first, largest = index, 0
        largest = max(largest, size)
    return [*found, (first, len(sizes))] if sizes else []


def table(rows: Sequence[np.ndarray], fill: int = -1) -> np.ndarray:
    """Ragged rows as ``[B, longest]`` int64, ``fill`` behind the end of each."""
    padded = np.full((len(rows), max((row.size for row in rows), default=0)), fill, np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: row.size] = row
    return padded


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def gather(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``[T, D]`` at ``[B, L]``, to ``[B, L, D]``; -1 gives zeros."""
    return states[index.clamp(min=0)] * (index >= 0).unsqueeze(-1)


def gather_rows(states: torch.Tensor, rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Ragged rows of ``states`` ``[T, D]``, as ``[B, longest, D]``; -1 and padding are zeros."""
    return gather(states, upload(table(rows), states.device))
