"""GLiNER heads: entity candidates from encoder states. Plain torch, no vLLM import.

Both heads work on all requests of an engine step at once: words, labels and LSTM in padded groups, spans in
parts of a group whose memory is bounded. Thresholding happens on the device; what leaves is one row per
candidate. The host waits for the device a few times a part: for the number of candidates, and for them.

The blob of a request holds, in this order:

0. ``float32 [1]`` threshold; a candidate's score must be greater;
1. ``int32 [C]`` for each label, the token whose state represents it;
2. ``int32 [W]`` for each word, the token whose state represents it, or -1 for a word without tokens; with mean
   or max pooling ``int32 [W + 1]``, where each word's tokens begin and the last one's end.

A result holds ``int32 start, end, label`` and ``float32 score``, one entry a candidate, in the order in which
the library would list them: that order decides ties.

Shape legend: B requests of a group, W words, C labels, K widths, D hidden size, N candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vllm_factory.errors import TransportError
from vllm_factory.poolers.gliner_config import GlinerConfig
from vllm_factory.poolers.ragged import gather_rows, runs
from vllm_factory.poolers.span_layers import TokenMarker, projection, span_layer
from vllm_factory.pooling.protocol import PoolerResult, Status

#: Padded words of one group: the LSTM runs once a group, and its steps cannot be batched otherwise.
WORD_BUDGET = 2**17
#: Rows of the widest activation that one part of a group may have (a row is four hidden sizes wide).
ROW_BUDGET = 2**16
#: Candidates that one request may have; more means that the threshold selects nothing in particular.
MAX_CANDIDATES = 2**18


@dataclass(frozen=True, slots=True)
class GlinerRequest:
    """A checked blob. ``words`` is ``[W]`` or ``[W + 1]``, see the module's text."""

    threshold: float
    labels: np.ndarray
    words: np.ndarray
    num_words: int


class Group(NamedTuple):
    """Requests of one padded computation, on the device.

    Attributes:
        words: ``[B, W, D]``, zeros behind each request's last word.
        labels: ``[B, C, D]``, zeros behind each request's last label.
        num_words: ``[B]`` int64, and the same on the host.
        num_labels: ``[B]`` int64.
        threshold: ``[B]`` float32.
    """

    words: torch.Tensor
    labels: torch.Tensor
    num_words: torch.Tensor
    lengths: list[int]
    num_labels: torch.Tensor
    threshold: torch.Tensor

    def part(self, first: int, last: int) -> Group:
        """Requests ``first:last``, with no more padding than they need."""
        lengths = self.lengths[first:last]
        rows = slice(first, last)
        words = self.words[rows, : max(lengths)]
        return Group(
            words,
            self.labels[rows],
            self.num_words[rows],
            lengths,
            self.num_labels[rows],
            self.threshold[rows],
        )

    @property
    def word_mask(self) -> torch.Tensor:
        """``[B, W]``."""
        return torch.arange(self.words.shape[1], device=self.words.device) < self.num_words[:, None]

    @property
    def label_mask(self) -> torch.Tensor:
        """``[B, C]``."""
        return torch.arange(self.labels.shape[1], device=self.words.device) < self.num_labels[:, None]


class Candidates(NamedTuple):
    """Rows of all requests of a group, sorted by request. All ``[N]``."""

    request: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    label: torch.Tensor
    score: torch.Tensor


class GlinerPooler(nn.Module):
    """What both heads share: words, labels, LSTM, grouping, and the way back to the host.

    Args:
        config: The head's configuration.
        encoder_size: Width of the encoder's states.
    """

    task = "token_classify"
    blob_kind = 1

    def __init__(self, config: GlinerConfig, encoder_size: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.projection = nn.Linear(encoder_size, size) if encoder_size != size else None
        self.rnn = (
            nn.LSTM(size, size // 2, config.num_rnn_layers, batch_first=True, bidirectional=True)
            if config.num_rnn_layers > 0
            else None
        )

    def rows(self, request: GlinerRequest) -> int:
        """Rows of the widest activation that a request needs."""
        raise NotImplementedError

    def candidates(self, group: Group, limits: _Limits) -> Candidates:
        """All candidates of the requests that are within their limits."""
        raise NotImplementedError

    def parse(self, arrays: Sequence[np.ndarray], num_tokens: int) -> GlinerRequest:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        if [a.dtype.kind for a in arrays] != ["f", "i", "i"]:
            raise TransportError(f"arrays of dtype {[str(a.dtype) for a in arrays]}; expected f, i, i")
        threshold, labels, words = arrays
        bounds = self.config.sends_word_bounds
        if threshold.size != 1 or not np.isfinite(threshold[0]) or labels.size < 1 or words.size < int(bounds):
            raise TransportError(f"{threshold.size} thresholds, {labels.size} labels, {words.size} words")
        if labels.min() < 0 or labels.max() >= num_tokens:
            raise TransportError(f"a label's token is outside the prompt of {num_tokens} tokens")
        _check_words(words, num_tokens, bounds)
        return GlinerRequest(float(threshold[0]), labels, words, words.size - int(bounds))

    def pool(
        self, hidden_states: torch.Tensor, starts: Sequence[int], requests: Sequence[GlinerRequest]
    ) -> list[PoolerResult]:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        results = [_result(np.empty((3, 0)), np.empty(0)) for _ in requests]
        states = hidden_states if self.projection is None else self.projection(hidden_states)
        # Longest first: neighbours are of similar length, and little of a group is padding.
        order = sorted((i for i, r in enumerate(requests) if r.num_words), key=lambda i: -requests[i].num_words)
        for first, last in runs([requests[i].num_words for i in order], WORD_BUDGET):
            members = order[first:last]
            group = self._group(states, [starts[i] for i in members], [requests[i] for i in members])
            for begin, end in runs([self.rows(requests[i]) for i in members], ROW_BUDGET):
                found = self._results(group.part(begin, end))
                for index, result in zip(members[begin:end], found, strict=True):
                    results[index] = result
        return results

    def _group(self, states: torch.Tensor, starts: list[int], requests: list[GlinerRequest]) -> Group:
        device = states.device
        lengths = [r.num_words for r in requests]
        counts = [r.labels.size for r in requests]
        labels = gather_rows(states, [r.labels + s for r, s in zip(requests, starts, strict=True)])
        words = self._words(states, starts, requests)
        if self.rnn is not None:
            words = self._contextualise(words, lengths)
        numbers = torch.from_numpy(np.array([lengths, counts])).to(device, non_blocking=True)
        threshold = torch.from_numpy(np.array([r.threshold for r in requests], np.float32))
        return Group(words, labels, numbers[0], lengths, numbers[1], threshold.to(device, non_blocking=True))

    def _words(self, states: torch.Tensor, starts: list[int], requests: list[GlinerRequest]) -> torch.Tensor:
        rows = [np.where(r.words < 0, -1, r.words + s) for r, s in zip(requests, starts, strict=True)]
        if not self.config.sends_word_bounds:
            return gather_rows(states, rows)
        return _pool_words(states, rows, self.config.subtoken_pooling)

    def _contextualise(self, words: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        assert self.rnn is not None
        packed = pack_padded_sequence(
            words, torch.tensor(lengths, device="cpu"), batch_first=True, enforce_sorted=False
        )
        # cuDNN would compute a float32 LSTM in TF32, whose rounding depends on the batch.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            states = self.rnn(packed)[0]
        return pad_packed_sequence(states, batch_first=True, total_length=words.shape[1])[0]

    def _results(self, group: Group) -> list[PoolerResult]:
        limits = _Limits(group)
        found = self.candidates(group, limits)
        indices = torch.stack([found.request, found.start, found.end, found.label]).to(torch.int32).cpu().numpy()
        scores = found.score.cpu().numpy()
        bounds = np.searchsorted(indices[0], np.arange(len(group.lengths) + 1))
        return [
            _result(indices[1:, a:b], scores[a:b]) if status is Status.OK else PoolerResult(status)
            for status, a, b in zip(limits.statuses, bounds[:-1], bounds[1:], strict=True)
        ]


class _Limits:
    """Which requests of a group may have candidates at all."""

    def __init__(self, group: Group) -> None:
        self.statuses = [Status.OK] * len(group.lengths)

    def keep(self, counts: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Record what is wrong with each request, and return ``[B]`` bool of those without fault.

        Args:
            counts: ``[B]`` candidates of each request.
            finite: ``[B]`` whether all scores of the request's own words and labels are finite.
        """
        for index, (count, is_finite) in enumerate(torch.stack([counts, finite.to(counts.dtype)], 1).tolist()):
            if not is_finite:
                self.statuses[index] = Status.NOT_FINITE
            elif count > MAX_CANDIDATES:
                self.statuses[index] = Status.TOO_MANY
        return finite & (counts <= MAX_CANDIDATES)


class GlinerSpanPooler(GlinerPooler):
    """Scores every span of up to ``max_width`` words against every label."""

    def __init__(self, config: GlinerConfig, encoder_size: int) -> None:
        super().__init__(config, encoder_size)
        self.span_rep_layer = span_layer(config.span_mode, config.hidden_size, config.max_width)
        self.prompt_rep_layer = projection(config.hidden_size, config.hidden_size)

    def rows(self, request: GlinerRequest) -> int:
        return request.num_words * self.config.max_width

    def logits(self, group: Group) -> torch.Tensor:
        """``[B, W, K, C]`` float32: the last product's sum is worth more digits than a 16-bit type has."""
        spans = self.span_rep_layer(group.words, group.num_words)
        return torch.einsum("bwkd,bcd->bwkc", spans.float(), self.prompt_rep_layer(group.labels).float())

    def candidates(self, group: Group, limits: _Limits) -> Candidates:
        logits = self.logits(group)
        score = torch.sigmoid(logits)
        inside = self._inside(group).unsqueeze(-1) & group.label_mask[:, None, None, :]
        above = inside & (score > group.threshold[:, None, None, None])
        finite = (logits.isfinite() | ~inside).flatten(1).all(1)
        above &= limits.keep(above.flatten(1).sum(1), finite)[:, None, None, None]
        request, start, width, label = above.nonzero(as_tuple=True)
        return Candidates(request, start, start + width, label, score[request, start, width, label])

    def _inside(self, group: Group) -> torch.Tensor:
        """``[B, W, K]``: the span ends within the text."""
        start = torch.arange(group.words.shape[1], device=group.words.device)
        end = start[:, None] + torch.arange(self.config.max_width, device=group.words.device)
        return end < group.num_words[:, None, None]


class TokenScorer(nn.Module):
    """Start, end and inside scores of each word for each label (gliner's ``Scorer``)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.proj_token = nn.Linear(hidden_size, 2 * hidden_size)
        self.proj_label = nn.Linear(hidden_size, 2 * hidden_size)
        self.out_mlp = nn.Sequential(
            nn.Linear(3 * hidden_size, 4 * hidden_size),
            nn.Identity(),
            nn.ReLU(),
            nn.Linear(4 * hidden_size, 3),
        )

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """``[B, W, D]`` and ``[B, C, D]`` to ``[B, W, C, 3]``, some words at a time to bound memory."""
        label = self.proj_label(labels).unsqueeze(1)
        step = max(1, ROW_BUDGET // (labels.shape[0] * labels.shape[1]))
        scores = [self._score(chunk, label) for chunk in self.proj_token(words).split(step, dim=1)]
        return torch.cat(scores, dim=1)

    def _score(self, word: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        shape = (word.shape[0], word.shape[1], label.shape[2], word.shape[2])
        word_side, word_factor = word.unsqueeze(2).expand(shape).chunk(2, dim=-1)
        label_side, label_factor = label.expand(shape).chunk(2, dim=-1)
        return self.out_mlp(torch.cat([word_side, label_side, word_factor * label_factor], dim=-1))


class GlinerTokenPooler(GlinerPooler):
    """Scores words, and joins a start and an end of one label when every word between is inside."""

    def __init__(self, config: GlinerConfig, encoder_size: int) -> None:
        super().__init__(config, encoder_size)
        self.scorer = TokenScorer(config.hidden_size)
        self.span_rep_layer = TokenMarker(config.hidden_size) if config.represent_spans else None

    def rows(self, request: GlinerRequest) -> int:
        # The scorer bounds its own memory; this bounds the score tensors, which are three values wide.
        return max(1, request.num_words * request.labels.size // 16)

    def candidates(self, group: Group, limits: _Limits) -> Candidates:
        logits = self.scorer(group.words, group.labels)
        inside = (group.word_mask[:, :, None] & group.label_mask[:, None, :]).unsqueeze(-1)
        finite = (logits.isfinite() | ~inside).flatten(1).all(1)
        # [B, C, W] each: a label's words lie side by side.
        start, end, within = torch.sigmoid(logits.float()).masked_fill(~inside, -1.0).permute(3, 0, 2, 1)
        pairs = self._pairs(start, end, within, group, limits, finite)
        return pairs if self.span_rep_layer is None else self._rescore(pairs, group, limits, finite)

    def _pairs(
        self,
        start: torch.Tensor,
        end: torch.Tensor,
        within: torch.Tensor,
        group: Group,
        limits: _Limits,
        finite: torch.Tensor,
    ) -> Candidates:
        threshold = group.threshold[:, None, None]
        # The library compares "inside" with >= when it joins words, with > when it represents spans.
        unbroken = within > threshold if self.config.represent_spans else within >= threshold
        run_end = _run_ends(unbroken)
        is_start = (start > threshold) & unbroken
        ends_before = torch.cumsum(end > threshold, dim=-1)
        first = ends_before - (end > threshold).long()
        last = ends_before.gather(-1, run_end.clamp(min=0))
        count = torch.where(is_start, last - first, 0).clamp(min=0)
        count *= limits.keep(count.flatten(1).sum(1), finite)[:, None, None]
        # Starts in the library's order: by word, then by label.
        request, word, label = count.transpose(1, 2).nonzero(as_tuple=True)
        repeat = count[request, label, word]
        request, word, label, base = (
            torch.repeat_interleave(x, repeat) for x in (request, word, label, first[request, label, word])
        )
        nth = torch.arange(request.shape[0], device=request.device)
        nth -= torch.repeat_interleave(torch.cumsum(repeat, 0) - repeat, repeat)
        last_word = _nth_end(end > threshold, request, label, base + nth)
        inner = _range_min(within, request, label, word, last_word)
        edges = torch.minimum(start[request, label, word], end[request, label, last_word])
        return Candidates(request, word, last_word, label, torch.minimum(inner, edges))

    def _rescore(self, pairs: Candidates, group: Group, limits: _Limits, finite: torch.Tensor) -> Candidates:
        assert self.span_rep_layer is not None
        spans = self.span_rep_layer(group.words, pairs.request, pairs.start, pairs.end)
        logits = torch.einsum("nd,ncd->nc", spans, group.labels[pairs.request])
        score = torch.sigmoid(logits.float())
        mask = group.label_mask[pairs.request]
        above = (score > group.threshold[pairs.request, None]) & mask
        counts = torch.zeros_like(group.num_words).index_add_(0, pairs.request, above.sum(1))
        bad = ~(logits.isfinite() | ~mask).all(1)
        finite = finite & (torch.zeros_like(group.num_words).index_add_(0, pairs.request, bad.long()) == 0)
        above &= limits.keep(counts, finite)[pairs.request, None]
        pair, label = above.nonzero(as_tuple=True)
        return Candidates(pairs.request[pair], pairs.start[pair], pairs.end[pair], label, score[pair, label])


def gliner_pooler(config: GlinerConfig, encoder_size: int) -> GlinerPooler:
    """The head that a configuration asks for."""
    head = GlinerTokenPooler if config.token_level else GlinerSpanPooler
    return head(config, encoder_size)


def _check_words(words: np.ndarray, num_tokens: int, bounds: bool) -> None:
    lowest, highest = (0, num_tokens) if bounds else (-1, num_tokens - 1)
    if words.size and (words.min() < lowest or words.max() > highest):
        raise TransportError(f"a word's token is outside the prompt of {num_tokens} tokens")
    if bounds and np.any(np.diff(words) < 0):
        raise TransportError("the words' tokens do not follow each other")


def _result(indices: np.ndarray, scores: np.ndarray) -> PoolerResult:
    """``[3, N]`` start, end, label and ``[N]`` scores, as the decoder wants them."""
    return PoolerResult(Status.OK, (*indices.astype(np.int32), scores.astype(np.float32)))


def _pool_words(states: torch.Tensor, bounds: list[np.ndarray], mode: str) -> torch.Tensor:
    """Mean or maximum over each word's tokens; ``bounds`` are ``[W + 1]`` rows of ``states`` a request."""
    longest = max(b.size for b in bounds) - 1
    tokens = np.concatenate([np.arange(b[0], b[-1]) for b in bounds])
    words = np.concatenate(
        [np.repeat(np.arange(b.size - 1), np.diff(b)) + i * longest for i, b in enumerate(bounds)]
    )
    index = torch.from_numpy(np.stack([tokens, words])).to(states.device, non_blocking=True)
    pooled = states.new_zeros(len(bounds) * longest, states.shape[1])
    target = index[1].unsqueeze(-1).expand(-1, states.shape[1])
    reduce = "mean" if mode == "mean" else "amax"
    pooled.scatter_reduce_(0, target, states[index[0]], reduce, include_self=False)
    return pooled.view(len(bounds), longest, -1)


def _run_ends(unbroken: torch.Tensor) -> torch.Tensor:
    """``[..., W]`` bool to int64: the last word of the run of true values that each word begins or continues.

    A word that is false itself gets the word before it.
    """
    word = torch.arange(unbroken.shape[-1], device=unbroken.device).expand_as(unbroken)
    breaks = torch.where(unbroken, unbroken.shape[-1], word)
    return torch.cummin(breaks.flip(-1), dim=-1).values.flip(-1) - 1


def _nth_end(is_end: torch.Tensor, request: torch.Tensor, label: torch.Tensor, nth: torch.Tensor) -> torch.Tensor:
    """Word of the ``nth`` end of a label, counted from the text's first word."""
    in_line = is_end.sum(-1).flatten()
    before = (torch.cumsum(in_line, 0) - in_line).view(is_end.shape[:2])
    return is_end.nonzero(as_tuple=True)[2][before[request, label] + nth]


def _range_min(
    values: torch.Tensor, request: torch.Tensor, label: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Minimum of ``values[request, label, first : last + 1]``, by a table of minima over powers of two."""
    levels = [values]
    for level in range((values.shape[-1] - 1).bit_length()):
        shift = min(2**level, values.shape[-1] - 1)
        shifted = torch.cat([levels[-1][..., shift:], levels[-1][..., :shift]], dim=-1)
        levels.append(torch.minimum(levels[-1], shifted))
    table = torch.stack(levels)
    exponent = torch.floor(torch.log2((last - first + 1).double())).long()
    right = last - 2**exponent + 1
    return torch.minimum(table[exponent, request, label, first], table[exponent, request, label, right])
