"""Label vectors by content, kept on the device within a bound in bytes.

A knowledge base is the same in request after request, and a label's vector depends on the label alone. What a
vector is does not depend on whether it was kept: a miss computes it, a hit returns what a miss once computed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from vllm_factory.errors import UnsupportedError, shown

#: Bytes of label vectors that a model keeps: 65,536 of 1,024 float32 values.
CACHE_BYTES = 2**28
CACHE_VARIABLE = "VLLM_FACTORY_LABEL_CACHE_BYTES"

#: Vectors of the labels at these places of a list, ``[len(places), D]``.
Compute = Callable[[Sequence[int]], torch.Tensor]


def cache_bytes() -> int:
    """The bound that the environment sets, or the default.

    Raises:
        UnsupportedError: The variable is no whole number.
    """
    value = os.environ.get(CACHE_VARIABLE)
    if value is None:
        return CACHE_BYTES
    if not value.isdecimal():
        raise UnsupportedError(f"{CACHE_VARIABLE}={shown(value)}: expected a whole number of bytes")
    return int(value)


class LabelCache(nn.Module):
    """A table of vectors, of which the least recently used give way.

    Args:
        width: D.
        max_bytes: Bound on the table; 0 keeps nothing.
    """

    table: torch.Tensor

    def __init__(self, width: int, max_bytes: int) -> None:
        super().__init__()
        self.width, self.max_bytes = width, max_bytes
        self.hits = self.misses = 0
        # Neither a weight nor saved; a buffer, so that it lives where the model lives.
        self.register_buffer("table", torch.empty(0, width), persistent=False)
        self._slots: OrderedDict[bytes, int] = OrderedDict()

    @property
    def capacity(self) -> int:
        """Labels that the table can hold."""
        return self.max_bytes // (self.width * self.table.element_size())

    def lookup(self, keys: Sequence[bytes], compute: Compute) -> torch.Tensor:
        """Vectors of labels, in order.

        Args:
            keys: What identifies each label's content; no two alike.
            compute: Called once, for what is not kept.

        Returns:
            ``[len(keys), D]``.
        """
        slots = [self._slots.get(key, -1) for key in keys]
        missing = [place for place, slot in enumerate(slots) if slot < 0]
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        for key, slot in zip(keys, slots, strict=True):
            if slot >= 0:
                self._slots.move_to_end(key)
        if not missing:
            return self.table[torch.tensor(slots, device=self.table.device)]
        computed = compute(missing)
        vectors = computed.new_empty(len(keys), self.width)
        vectors[torch.tensor(missing, device=vectors.device)] = computed
        kept = [place for place, slot in enumerate(slots) if slot >= 0]
        if kept:
            index = torch.tensor([[slots[place] for place in kept], kept], device=vectors.device)
            vectors[index[1]] = self.table[index[0]]
        self._keep([keys[place] for place in missing], computed)
        return vectors

    def _keep(self, keys: list[bytes], vectors: torch.Tensor) -> None:
        capacity = self.capacity
        if not capacity:
            return
        if self.table.shape[0] != capacity:
            self.table = vectors.new_empty(capacity, self.width)
        # Of more labels than the table holds, the last ones.
        keys, vectors = keys[-capacity:], vectors[-capacity:]
        slots = []
        for key in keys:
            slot = len(self._slots) if len(self._slots) < capacity else self._slots.popitem(last=False)[1]
            self._slots[key] = slot
            slots.append(slot)
        self.table[torch.tensor(slots, device=vectors.device)] = vectors
