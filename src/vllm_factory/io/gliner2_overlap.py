"""Which of several overlapping spans of one field stay, as gliner2 2.1.0 decides it (``inference/overlap.py``).

=============  ======================================================================================
policy         stays
=============  ======================================================================================
``None``       greedily by score, what overlaps nothing that stayed (the library's default for spans)
``allow``      everything
``nested``     greedily by score, what is apart from all that stayed, or within, or around
``disallow``   the spans without overlap whose scores add up to most
``longest``    what no other span contains
=============  ======================================================================================

Spans are half-open. The result is ranked: highest score first, then by start, then by end. A span that occurs
twice counts once, with the higher score.
"""

from __future__ import annotations

import bisect
from typing import Literal, NamedTuple

import numpy as np

from vllm_factory.io.decoding import FlatSpans, NestedSpans

Policy = Literal["allow", "nested", "disallow", "longest"]

#: What a request may call the policies.
POLICY_NAMES: dict[str, Policy] = {
    "allow": "allow",
    "all": "allow",
    "none": "allow",
    "nested": "nested",
    "allow_nested": "nested",
    "flat": "disallow",
    "disallow": "disallow",
    "no_overlap": "disallow",
    "non_overlapping": "disallow",
    "longest": "longest",
    "keep_longest": "longest",
}


def policy_called(name: str) -> Policy | None:
    """The policy of a name, however it is spelled; ``None`` for a name that none has."""
    return POLICY_NAMES.get(name.strip().lower().replace("-", "_"))


def select_spans(start: np.ndarray, end: np.ndarray, score: np.ndarray, policy: Policy | None) -> list[int]:
    """Indices of the spans that stay, ranked.

    Args:
        start, end: Half-open, ``[n]``.
        score: ``[n]``.
        policy: See the module's text.
    """
    if not len(start):
        return []
    ranked = np.lexsort((end, start, -score))
    _, first = np.unique(np.stack([start[ranked], end[ranked]]), axis=1, return_index=True)
    ranked = ranked[np.sort(first)]
    if policy == "allow":
        return ranked.tolist()
    if policy == "longest":
        contained = _contained(start, end, ranked)
        return [index for index in ranked.tolist() if index not in contained]
    if policy == "disallow":
        return _heaviest(start, end, score, ranked)
    return _greedy(start, end, ranked, nested=policy == "nested")


def _greedy(start: np.ndarray, end: np.ndarray, ranked: np.ndarray, *, nested: bool) -> list[int]:
    # Only the order of the boundaries matters, so spans become runs of the cells between them.
    bounds = np.unique(np.concatenate([start[ranked], end[ranked]]))
    first = np.searchsorted(bounds, start[ranked]).tolist()
    last = (np.searchsorted(bounds, end[ranked]) - 1).tolist()
    taken = NestedSpans(len(bounds)) if nested else FlatSpans(len(bounds))
    kept = []
    for index, low, high in zip(ranked.tolist(), first, last, strict=True):
        if taken.accepts(low, high):
            taken.add(low, high)
            kept.append(index)
    return kept


def _contained(start: np.ndarray, end: np.ndarray, ranked: np.ndarray) -> set[int]:
    """Spans within another one: among those that start no later, longest first, one reaches at least as far."""
    order = ranked[np.lexsort((-end[ranked], start[ranked]))]
    reach = np.maximum.accumulate(end[order])
    return set(order[1:][reach[:-1] >= end[order][1:]].tolist())


class _Choice(NamedTuple):
    """The best selection among the first spans by end: its last span and what it was before that."""

    total: float
    size: int
    span: int
    before: _Choice | None

    def ranks(self) -> list[int]:
        """The spans' ranks, best first."""
        found, step = [], self
        while step.before is not None:
            found.append(step.span)
            step = step.before
        return sorted(found)


def _heaviest(start: np.ndarray, end: np.ndarray, score: np.ndarray, ranked: np.ndarray) -> list[int]:
    """Weighted interval scheduling. Of equal totals the larger selection wins, then the better ranked one."""
    starts, ends, scores = start[ranked].tolist(), end[ranked].tolist(), score[ranked].tolist()
    order = sorted(range(len(ranked)), key=lambda rank: (ends[rank], starts[rank], rank))
    sorted_ends = [ends[rank] for rank in order]
    best = [_Choice(0.0, 0, -1, None)]
    for position, rank in enumerate(order):
        earlier = best[bisect.bisect_right(sorted_ends, starts[rank], 0, position)]
        with_it = _Choice(earlier.total + scores[rank], earlier.size + 1, rank, earlier)
        best.append(_better(with_it, best[-1]))
    return [int(ranked[rank]) for rank in best[-1].ranks()]


def _better(one: _Choice, other: _Choice) -> _Choice:
    if (one.total, one.size) != (other.total, other.size):
        return max(one, other, key=lambda choice: (choice.total, choice.size))
    return one if one.ranks() < other.ranks() else other
