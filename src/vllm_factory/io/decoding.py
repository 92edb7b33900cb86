"""From candidate spans to entities: which of several overlapping candidates stay.

The rule is gliner's (0.2.29, ``decoding/decoder.py``): candidates are taken by descending score, and one stays if
it is compatible with all that stayed before. The order is total: candidates of equal score keep the order in
which they came, which the heads define (by start, then width, then label for spans; by start, then label, then
end for the token-level head). What stays is returned by start; entities that start together by score.

Compatible means:

===========  ==========================================================================================
flat         no word in common
nested       no word in common, or one lies within the other
multi_label  as above, and any number of labels for the very same span; otherwise one label a span
===========  ==========================================================================================
"""

from __future__ import annotations

import numpy as np


def resolve_overlaps(
    start: np.ndarray, end: np.ndarray, score: np.ndarray, *, flat: bool, multi_label: bool
) -> list[int]:
    """Indices of the candidates that stay, in the order of the response.

    Args:
        start, end: First and last word of each candidate, ``[N]``.
        score: ``[N]``.
        flat: Whether entities may not nest.
        multi_label: Whether one span may have several labels.
    """
    if not len(start):
        return []
    spans = FlatSpans(int(end.max()) + 1) if flat else NestedSpans(int(end.max()) + 1)
    chosen: set[tuple[int, int]] = set()
    kept: list[int] = []
    order = np.argsort(-score, kind="stable")
    for index, first, last in zip(order.tolist(), start[order].tolist(), end[order].tolist(), strict=True):
        if (first, last) in chosen:
            if multi_label:
                kept.append(index)
        elif spans.accepts(first, last):
            spans.add(first, last)
            chosen.add((first, last))
            kept.append(index)
    return sorted(kept, key=lambda index: int(start[index]))


class FlatSpans:
    """Spans without a common word."""

    def __init__(self, num_words: int) -> None:
        self.taken = bytearray(num_words)

    def accepts(self, first: int, last: int) -> bool:
        return not any(self.taken[first : last + 1])

    def add(self, first: int, last: int) -> None:
        self.taken[first : last + 1] = b"\x01" * (last + 1 - first)


class NestedSpans:
    """Spans of which any two are apart or one within the other.

    For each word, the farthest end of a span that starts there and the farthest start of one that ends there:
    enough to see a partial overlap without comparing with every span.
    """

    def __init__(self, num_words: int) -> None:
        self.farthest_end = [-1] * num_words
        self.farthest_start = list(range(num_words))

    def accepts(self, first: int, last: int) -> bool:
        sticks_out = any(end > last for end in self.farthest_end[first + 1 : last + 1])
        return not sticks_out and not any(start < first for start in self.farthest_start[first:last])

    def add(self, first: int, last: int) -> None:
        self.farthest_end[first] = max(self.farthest_end[first], last)
        self.farthest_start[last] = min(self.farthest_start[last], first)
