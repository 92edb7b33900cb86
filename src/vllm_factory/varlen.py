"""Sequence boundaries of a flat batch, and padded views of it in groups of bounded size.

Shape legend: T tokens of all sequences, S sequences, B sequences of one group, L longest sequence of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

#: Largest B·L·L of one padded group: it bounds the H-fold score tensors of an attention. On a CPU they should stay
#: in its caches; a GPU wants few launches.
GROUP_BUDGETS = {"cpu": 2**18, "cuda": 2**21}
_OTHER_DEVICES = 2**21


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Some sequences of the flat batch, as rows of a padded one.

    Attributes:
        index: ``[B, L]`` int64, the flat row of each position; padding points at row 0.
        mask: ``[B, L]`` bool, whether the position is a token; ``None`` when all are (no padding).
    """

    index: torch.Tensor
    mask: torch.Tensor | None

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """``[T, ...]`` to ``[B, L, ...]``. Padding holds the values of flat row 0: mask before use."""
        return flat[self.index]

    def pad_with_zeros(self, flat: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` to ``[B, L, D]`` with zeros where there is no token."""
        padded = self.pad(flat)
        return padded if self.mask is None else padded * self.mask.unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class Grouping:
    """All sequences of a batch in padded groups.

    Attributes:
        groups: The groups; every token is in exactly one.
        inverse: ``[num_tokens]`` int64; where each flat row is in the concatenation of the flattened groups.
    """

    groups: list[PaddedGroup]
    inverse: torch.Tensor

    def unpad(self, padded: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
        """One ``[B, L, D]`` per group, to flat ``[num_rows, D]``; rows of no sequence are zeros."""
        flat = torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in padded])[self.inverse]
        return F.pad(flat, (0, 0, 0, num_rows - flat.shape[0]))


#: Attention within one group: query, key and value, ``[B, H, L, D]`` each, to ``[B, H, L, D]``.
GroupAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PaddedGroup], torch.Tensor]


class Varlen:
    """The sequences of a flat batch.

    Args:
        lengths: Tokens of each sequence, on the host. Sequences follow each other in the flat batch from
            row 0; empty ones are allowed (graph padding) and belong to no group.
        device: Where indices are needed.

    Raises:
        ValueError: There is no token at all.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = [int(length) for length in lengths]
        self.num_tokens = sum(self.lengths)
        if self.num_tokens < 1:
            raise ValueError(f"a batch without tokens: lengths {self.lengths}")
        self.starts = (np.cumsum(self.lengths) - self.lengths).tolist()
        self.device = device
        self.budget = GROUP_BUDGETS.get(device.type, _OTHER_DEVICES)
        self._grouping: Grouping | None = None
        #: For what layers derive from the boundaries alone, so that the first computes it for all.
        self.memo: dict[Any, torch.Tensor] = {}

    def grouping(self) -> Grouping:
        """Padded groups, each with at most ``budget`` of B·L·L (or one sequence).

        Sequences of similar length come together, so little is padded. Computed once: all layers of a forward
        pass use the same groups.
        """
        if self._grouping is None:
            self._grouping = self._group()
        return self._grouping

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: GroupAttention
    ) -> torch.Tensor:
        """Attention of each sequence over itself, in padded groups of similar length.

        Args:
            query, key, value: ``[T, H, D]``.
            attention: What is done within a group.

        Returns:
            ``[T, H * D]``; rows of no sequence are zeros.
        """
        grouping = self.grouping()
        contexts = []
        for group in grouping.groups:
            context = attention(
                group.pad(query).transpose(1, 2),
                group.pad(key).transpose(1, 2),
                group.pad(value).transpose(1, 2),
                group,
            )
            contexts.append(context.transpose(1, 2).flatten(2))
        return grouping.unpad(contexts, query.shape[0])

    def query_rows(self, batch: int, length: int) -> int:
        """Query rows of ``batch`` sequences of ``length`` tokens whose scores fit the budget; at least one."""
        return max(1, self.budget // (batch * length))

    def _group(self) -> Grouping:
        groups, inverse, offset = [], np.empty(self.num_tokens, np.int64), 0
        for members in self._split():
            lengths = np.array([self.lengths[i] for i in members])
            starts = np.array([self.starts[i] for i in members])
            position = np.arange(lengths.max())
            mask = position < lengths[:, None]
            index = np.where(mask, starts[:, None] + position, 0)
            inverse[index[mask]] = offset + np.flatnonzero(mask)
            offset += mask.size
            groups.append(PaddedGroup(self._upload(index), None if mask.all() else self._upload(mask)))
        return Grouping(groups, self._upload(inverse))

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _split(self) -> Iterator[list[int]]:
        order = sorted((i for i, n in enumerate(self.lengths) if n), key=lambda i: -self.lengths[i])
        group: list[int] = []
        for sequence in order:
            longest = self.lengths[group[0]] if group else 0
            too_big = (len(group) + 1) * longest * longest > self.budget
            # Padding a sequence to more than 1.25 of its length costs more than another launch.
            too_padded = longest > 64 and longest > 1.25 * self.lengths[sequence]
            if group and (too_big or too_padded):
                yield group
                group = []
            group.append(sequence)
        if group:
            yield group
