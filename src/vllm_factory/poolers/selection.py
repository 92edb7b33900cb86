"""What a linking request asks of a GLiNER head beyond its candidates. Plain torch, no vLLM import.

Candidate labels of a knowledge base are many. Where a span can have one label only, its best one decides, so
one row a span leaves the device instead of one a label; beside it go the span's best-ranked candidates, those
below the threshold included. A request may also name the spans (mentions) that are to be scored at all.

Shape legend: B requests of a group, W words, C labels, K widths, M spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_factory.errors import TransportError
from vllm_factory.poolers.ragged import upload

#: Ranked candidates that one span may have.
MAX_TOP = 100
_HEADER = 4


@dataclass(frozen=True, slots=True)
class Selection:
    """How the candidates of one request are chosen. The defaults choose nothing: every row leaves.

    Attributes:
        best_only: One label a span: its best below ``first``, and its best from ``first`` on.
        top: Ranked candidate labels that are listed for each span with a candidate above the threshold.
        first: The first candidate label; those before it are entity types and are never ranked.
        mentions: ``[M, 2]`` int32 first and last words of the only spans that count; ``None`` for all spans.
    """

    best_only: bool = False
    top: int = 0
    first: int = 0
    mentions: np.ndarray | None = None

    def pack(self) -> np.ndarray:
        """As one int32 array of a blob."""
        header = [int(self.best_only), self.top, self.first, int(self.mentions is not None)]
        spans = [] if self.mentions is None else self.mentions.ravel().tolist()
        return np.array([*header, *spans], np.int32)

    @classmethod
    def unpack(cls, array: np.ndarray, num_words: int, num_labels: int) -> Selection:
        """The inverse of :meth:`pack`.

        Raises:
            TransportError: It does not fit a request of ``num_words`` words and ``num_labels`` labels.
        """
        if array.size < _HEADER or array.size % 2 or array[:_HEADER].min() < 0:
            raise TransportError(f"a selection of {array.size} values")
        best_only, top, first, restricted = array[:_HEADER].tolist()
        spans = array[_HEADER:].reshape(-1, 2)
        if (
            best_only > 1
            or restricted > 1
            or top > MAX_TOP
            or first > num_labels
            or (spans.size and not restricted)
        ):
            raise TransportError(f"a selection of {array[:_HEADER].tolist()}")
        if spans.size and (spans.min() < 0 or spans.max() >= num_words or np.any(spans[:, 1] < spans[:, 0])):
            raise TransportError(f"a mention is outside the {num_words} words")
        return cls(bool(best_only), top, first, spans if restricted else None)


ALL_ROWS = Selection()


class Ranked(NamedTuple):
    """Best candidate labels of spans, sorted by request: ``[M]`` each, and ``[M, top]`` each.

    A label that the span's request does not rank has a negative score.
    """

    request: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    label: torch.Tensor
    score: torch.Tensor


class Selections:
    """The selections of a group's requests, on its device.

    Args:
        members: One a request.
        num_labels: ``[B]``.
        width: C.
    """

    def __init__(self, members: Sequence[Selection], num_labels: torch.Tensor, width: int) -> None:
        self.members = members
        self.device = num_labels.device
        self._num_labels = num_labels
        self._width = width
        self.any_best = any(s.best_only for s in members)
        self.any_mentions = any(s.mentions is not None for s in members)
        self.top = min(max((s.top for s in members), default=0), width)

    @property
    def ranks(self) -> torch.Tensor:
        """``[B]`` bool: the request wants ranked candidates."""
        return upload(np.array([s.top > 0 for s in self.members]), self.device)

    @property
    def restricted(self) -> torch.Tensor:
        """``[B]`` bool: only mentions count."""
        return upload(np.array([s.mentions is not None for s in self.members]), self.device)

    def candidate_labels(self) -> torch.Tensor:
        """``[B, C]`` bool: the label is a candidate of the request's knowledge base."""
        label = torch.arange(self._width, device=self.device)
        first = upload(np.array([s.first for s in self.members]), self.device)
        return (label >= first[:, None]) & (label < self._num_labels[:, None])

    def allowed_spans(self, num_words: int, max_width: int) -> torch.Tensor:
        """``[B, W, K]`` bool: the span is a mention, or its request has none."""
        allowed = np.ones((len(self.members), num_words, max_width), bool)
        for row, selection in zip(allowed, self.members, strict=True):
            if selection.mentions is not None:
                row[:] = False
                start, end = selection.mentions.T
                short = end - start < max_width
                row[start[short], (end - start)[short]] = True
        return upload(allowed, self.device)

    def mentions(self) -> torch.Tensor:
        """``[3, M]`` request, first word and last word of all mentions, each once, sorted by request."""
        spans = [np.empty((0, 3), np.int64)]
        for index, selection in enumerate(self.members):
            if selection.mentions is not None:
                unique = np.unique(selection.mentions, axis=0)
                spans.append(np.column_stack([np.full(len(unique), index), unique]))
        return upload(np.concatenate(spans).T, self.device)

    def best(self, above: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        """``above`` with at most two labels a span where the request wants its best only.

        Args:
            above: ``[B, ..., C]`` bool, scores that count.
            score: ``[B, ..., C]``.
        """
        if not self.any_best:
            return above
        inner = [1] * (above.dim() - 2)
        candidate = self.candidate_labels().view(len(self.members), *inner, -1)
        wanted = upload(np.array([s.best_only for s in self.members]), self.device).view(-1, *inner, 1)
        best = _only_best(above & candidate, score)
        if any(s.first for s in self.members):
            best |= _only_best(above & ~candidate, score)
        return torch.where(wanted, best, above)

    def rank(self, score: torch.Tensor, request: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels and scores ``[M, top]`` of the best candidates, from ``[M, C]`` scores of spans."""
        masked = score.masked_fill(~self.candidate_labels()[request], -1.0)
        scores, labels = masked.topk(self.top, dim=-1)
        return labels, scores


def _only_best(above: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    # Of equal scores the first label wins, as it does when the library sorts them: max() returns the first.
    best = score.masked_fill(~above, -1.0).max(dim=-1, keepdim=True).indices
    return torch.zeros_like(above).scatter_(-1, best, True) & above


def ranked_arrays(ranked: Ranked, members: Sequence[Selection]) -> list[tuple[np.ndarray, ...]]:
    """For each request: ``int32 start, end, label`` and ``float32 score``, one entry a span and label."""
    request, start, end = (t.cpu().numpy() for t in ranked[:3])
    label, score = ranked.label.cpu().numpy(), ranked.score.float().cpu().numpy()
    bounds = np.searchsorted(request, np.arange(len(members) + 1))
    arrays: list[tuple[np.ndarray, ...]] = []
    for selection, first, last in zip(members, bounds[:-1], bounds[1:], strict=True):
        columns = slice(0, selection.top)
        labels, scores = label[first:last, columns], score[first:last, columns]
        real = scores >= 0
        rows = np.repeat(np.arange(first, last), real.sum(1))
        arrays.append(
            (
                start[rows].astype(np.int32),
                end[rows].astype(np.int32),
                labels[real].astype(np.int32),
                scores[real].astype(np.float32),
            )
        )
    return arrays
