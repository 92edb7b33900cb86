"""GLiNER heads: entity candidates from encoder states. Plain torch, no vLLM import.

Both heads work on all requests of an engine step at once: words, labels and LSTM in padded groups, spans in
parts of a group whose memory is bounded. Thresholding happens on the device; what leaves is one row per
candidate. The host waits for the device a few times a part: for the number of candidates, and for them.

The blob of a request holds, in this order:

0. ``float32 [1]`` threshold; a candidate's score must be greater;
1. ``int32 [C]`` for each label, the token whose state represents it;
2. ``int32 [W]`` for each word, the token whose state represents it, or -1 for a word without tokens; with mean
   or max pooling ``int32 [W + 1]``, where each word's tokens begin and the last one's end;
3. optionally ``int32``, a :class:`~vllm_factory.poolers.selection.Selection`.

A result holds ``int32 start, end, label`` and ``float32 score``, one entry a candidate, in the order in which
the library would list them: that order decides ties. When the selection asks for ranked labels, the same four
arrays follow for them, one entry a span and label.

Shape legend: B requests of a group, W words, C labels, K widths, D hidden size, N candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vllm_factory.errors import TransportError
from vllm_factory.poolers.gliner_config import GlinerConfig
from vllm_factory.poolers.ragged import gather_rows, runs, upload
from vllm_factory.poolers.selection import ALL_ROWS, Ranked, Selection, Selections, ranked_arrays
from vllm_factory.poolers.span_layers import TokenMarker, projection, span_layer
from vllm_factory.pooling.protocol import PoolerResult, Status

#: Padded words of one group: the LSTM runs once a group, and its steps cannot be batched otherwise.
WORD_BUDGET = 2**17
#: Rows of the widest activation that one part of a group may have (a row is four hidden sizes wide).
ROW_BUDGET = 2**16
#: Logits of spans computed at once.
LOGIT_BUDGET = 2**24
#: Candidates that one request may have; more means that the threshold selects nothing in particular.
MAX_CANDIDATES = 2**18


@dataclass(frozen=True, slots=True)
class GlinerRequest:
    """A checked blob. ``words`` is ``[W]`` or ``[W + 1]``, see the module's text."""

    threshold: float
    labels: np.ndarray
    words: np.ndarray
    num_words: int
    num_labels: int
    selection: Selection = ALL_ROWS


class Group(NamedTuple):
    """Requests of one padded computation, on the device.

    Attributes:
        words: ``[B, W, D]``, zeros behind each request's last word.
        labels: ``[B, C, D]``, zeros behind each request's last label.
        num_words: ``[B]`` int64, and the same on the host.
        num_labels: ``[B]`` int64.
        threshold: ``[B]`` float32.
        selected: On the host, how each request's candidates are chosen.
    """

    words: torch.Tensor
    labels: torch.Tensor
    num_words: torch.Tensor
    lengths: list[int]
    num_labels: torch.Tensor
    threshold: torch.Tensor
    selected: list[Selection]

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
            self.selected[rows],
        )

    @property
    def selections(self) -> Selections:
        """``selected`` on the device."""
        return Selections(self.selected, self.num_labels, self.labels.shape[1])

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


class Found(NamedTuple):
    """What a head found in a group; ``ranked`` where some request asked for it."""

    candidates: Candidates
    ranked: Ranked | None = None


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

    def prepare(self) -> None:
        """Compute what depends on weights alone. Call once, after loading, on the final device."""
        if self.rnn is not None:
            self.rnn.flatten_parameters()

    def rows(self, request: GlinerRequest) -> int:
        """Rows of the widest activation that a request needs."""
        raise NotImplementedError

    def padded_rows(self, request: GlinerRequest) -> int:
        """Rows of the group's word and label states that a request needs."""
        return request.num_words

    def search(self, group: Group, limits: _Limits) -> Found:
        """All candidates of the requests that are within their limits."""
        raise NotImplementedError

    def parse(self, arrays: Sequence[np.ndarray], num_tokens: int) -> GlinerRequest:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        check_kinds(arrays, "fii", "fiii")
        threshold, labels, words = arrays[:3]
        if labels.size < 1 or labels.min() < 0 or labels.max() >= num_tokens:
            raise TransportError(f"no label, or a label's token is outside the prompt of {num_tokens} tokens")
        return self._request(threshold, labels, labels.size, words, arrays[3:], num_tokens)

    def _request(
        self,
        threshold: np.ndarray,
        labels: np.ndarray,
        num_labels: int,
        words: np.ndarray,
        selection: Sequence[np.ndarray],
        num_tokens: int,
    ) -> GlinerRequest:
        bounds = int(self.config.sends_word_bounds)
        if threshold.size != 1 or not np.isfinite(threshold[0]) or words.size < bounds:
            raise TransportError(f"{threshold.size} thresholds, {words.size} words")
        _check_words(words, num_tokens, bool(bounds))
        num_words = words.size - bounds
        chosen = Selection.unpack(selection[0], num_words, num_labels) if selection else ALL_ROWS
        return GlinerRequest(float(threshold[0]), labels, words, num_words, num_labels, chosen)

    def pool(
        self, hidden_states: torch.Tensor, starts: Sequence[int], requests: Sequence[GlinerRequest]
    ) -> list[PoolerResult]:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        results = [_nothing(request.selection) for request in requests]
        states = hidden_states if self.projection is None else self.projection(hidden_states)
        # Longest first: neighbours are of similar length, and little of a group is padding.
        order = sorted((i for i, r in enumerate(requests) if r.num_words), key=lambda i: -requests[i].num_words)
        for first, last in runs([self.padded_rows(requests[i]) for i in order], WORD_BUDGET):
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
        labels = self._labels(states, starts, requests)
        words = self._words(states, starts, requests)
        if self.rnn is not None:
            words = self._contextualise(words, lengths)
        numbers = upload(np.array([lengths, [r.num_labels for r in requests]]), device)
        threshold = upload(np.array([r.threshold for r in requests], np.float32), device)
        selected = [r.selection for r in requests]
        return Group(words, labels, numbers[0], lengths, numbers[1], threshold, selected)

    def _labels(self, states: torch.Tensor, starts: list[int], requests: list[GlinerRequest]) -> torch.Tensor:
        """``[B, C, D]``, zeros behind each request's last label."""
        return gather_rows(states, [r.labels + s for r, s in zip(requests, starts, strict=True)])

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
        found, ranked = self.search(group, limits)
        indices = torch.stack([found.request, found.start, found.end, found.label]).to(torch.int32).cpu().numpy()
        scores = found.score.cpu().numpy()
        bounds = np.searchsorted(indices[0], np.arange(len(group.lengths) + 1))
        tables = ranked_arrays(ranked, group.selected) if ranked is not None else [_EMPTY] * len(group.lengths)
        return [
            _result(indices[1:, a:b], scores[a:b], selection, table)
            if status is Status.OK
            else PoolerResult(status)
            for status, a, b, selection, table in zip(
                limits.statuses, bounds[:-1], bounds[1:], group.selected, tables, strict=True
            )
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
        spans = request.num_words * self.config.max_width
        return max(spans, spans * request.num_labels // (LOGIT_BUDGET // ROW_BUDGET))

    def label_features(self, labels: torch.Tensor) -> torch.Tensor:
        """What spans are multiplied with: ``[B, C, D]`` to the same."""
        return self.prompt_rep_layer(labels)

    def search(self, group: Group, limits: _Limits) -> Found:
        spans = self.span_rep_layer(group.words, group.num_words).float()
        labels = self.label_features(group.labels).float()
        selections, allowed = group.selections, self._allowed(group)
        count = torch.zeros_like(group.num_words)
        finite = torch.ones_like(count, dtype=torch.bool)
        rows, ranked = [], []
        # One piece, unless there are very many labels.
        step = max(1, LOGIT_BUDGET // (spans.shape[0] * spans.shape[2] * labels.shape[1]))
        for first in range(0, spans.shape[1], step):
            inside = allowed[:, first : first + step].unsqueeze(-1) & group.label_mask[:, None, None, :]
            # The last product's sum is worth more digits than a 16-bit type has.
            logits = torch.einsum("bwkd,bcd->bwkc", spans[:, first : first + step], labels)
            score = torch.sigmoid(logits)
            finite &= (logits.isfinite() | ~inside).flatten(1).all(1)
            above = inside & (score > group.threshold[:, None, None, None])
            chosen = selections.best(above, score)
            count += chosen.flatten(1).sum(1)
            # Only a request within its limits may make rows; those of the others are dropped at the end.
            chosen &= (finite & (count <= MAX_CANDIDATES))[:, None, None, None]
            rows.append(_span_rows(chosen, score, first))
            if selections.top:
                ranked.append(_ranked_spans(above & chosen.any(-1, keepdim=True), score, first, selections))
        keep = limits.keep(count, finite)
        found, table = _joined_pieces(rows), _joined_pieces(ranked) if ranked else None
        if len(rows) > 1:
            found = _by_request(found, keep)
            table = _by_request(table, keep) if table is not None else None
        return Found(found, table)

    def _allowed(self, group: Group) -> torch.Tensor:
        """``[B, W, K]``: the span ends within the text, and is a mention if the request has mentions."""
        num_words, widths = group.words.shape[1], self.config.max_width
        start = torch.arange(num_words, device=group.words.device)
        end = start[:, None] + torch.arange(widths, device=group.words.device)
        inside = end < group.num_words[:, None, None]
        selections = group.selections
        return inside & selections.allowed_spans(num_words, widths) if selections.any_mentions else inside


_RowsT = TypeVar("_RowsT", Candidates, Ranked)


def _joined_pieces(pieces: Sequence[_RowsT]) -> _RowsT:
    return type(pieces[0])(*(torch.cat(column) for column in zip(*pieces, strict=True)))


def _by_request(rows: _RowsT, keep: torch.Tensor) -> _RowsT:
    """Rows of the requests to keep, sorted by request and otherwise in their order."""
    (kept,) = keep[rows.request].nonzero(as_tuple=True)
    order = kept[torch.sort(rows.request[kept], stable=True).indices]
    return type(rows)(*(column[order] for column in rows))


def _span_rows(chosen: torch.Tensor, score: torch.Tensor, first: int) -> Candidates:
    """Rows of the chosen entries of ``[B, W, K, C]``, whose first word is the text's word ``first``."""
    request, word, width, label = chosen.nonzero(as_tuple=True)
    start = word + first
    return Candidates(request, start, start + width, label, score[request, word, width, label])


def _ranked_spans(above: torch.Tensor, score: torch.Tensor, first: int, selections: Selections) -> Ranked:
    """Ranked labels of the spans that have a candidate above the threshold; arguments as above."""
    wanted = selections.candidate_labels() & selections.ranks[:, None]
    request, word, width = (above & wanted[:, None, None, :]).any(-1).nonzero(as_tuple=True)
    labels, scores = selections.rank(score[request, word, width], request)
    start = word + first
    return Ranked(request, start, start + width, labels, scores)


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


class WordScores(NamedTuple):
    """Probabilities of each word for each label, ``[B, C, W]``; -1 behind the last word and the last label."""

    start: torch.Tensor
    end: torch.Tensor
    within: torch.Tensor


class GlinerTokenPooler(GlinerPooler):
    """Scores words, and joins a start and an end of one label when every word between is inside."""

    def __init__(self, config: GlinerConfig, encoder_size: int) -> None:
        super().__init__(config, encoder_size)
        self.scorer = TokenScorer(config.hidden_size)
        self.span_rep_layer = TokenMarker(config.hidden_size) if config.represent_spans else None

    def rows(self, request: GlinerRequest) -> int:
        # The scorer bounds its own memory; this bounds the score tensors, which are three values wide.
        return max(1, request.num_words * request.num_labels // 16)

    def search(self, group: Group, limits: _Limits) -> Found:
        logits = self.scorer(group.words, group.labels)
        inside = (group.word_mask[:, :, None] & group.label_mask[:, None, :]).unsqueeze(-1)
        finite = (logits.isfinite() | ~inside).flatten(1).all(1)
        # [B, C, W] each: a label's words lie side by side.
        scores = WordScores(*torch.sigmoid(logits.float()).masked_fill(~inside, -1.0).permute(3, 0, 2, 1))
        pairs = self._pairs(scores, group, limits, finite)
        if self.span_rep_layer is not None:
            return self._rescore(pairs, group, limits, finite)
        return Found(pairs, _ranked_pairs(pairs, scores, group) if group.selections.top else None)

    def _pairs(self, scores: WordScores, group: Group, limits: _Limits, finite: torch.Tensor) -> Candidates:
        threshold, selections = group.threshold[:, None, None], group.selections
        # The library compares "inside" with >= when it joins words, with > when it represents spans.
        unbroken = scores.within > threshold if self.config.represent_spans else scores.within >= threshold
        is_start, is_end = (scores.start > threshold) & unbroken, scores.end > threshold
        ends_before = torch.cumsum(is_end, dim=-1)
        first = ends_before - is_end.long()
        last = ends_before.gather(-1, _run_ends(unbroken).clamp(min=0))
        count = torch.where(is_start, last - first, 0).clamp(min=0)
        total = count.flatten(1).sum(1)
        if not selections.any_mentions:
            count *= limits.keep(total, finite)[:, None, None]
            return self._joined(count, first, is_end, scores)
        mentions, num_mentions = self._mentioned(scores, group)
        restricted = selections.restricted
        keep = limits.keep(torch.where(restricted, num_mentions, total), finite)
        count *= (keep & ~restricted)[:, None, None]
        joined = self._joined(count, first, is_end, scores)
        both = [torch.cat([a, b[keep[mentions.request]]]) for a, b in zip(joined, mentions, strict=True)]
        return _in_library_order(Candidates(*both))

    def _joined(
        self, count: torch.Tensor, first: torch.Tensor, is_end: torch.Tensor, scores: WordScores
    ) -> Candidates:
        """``count[request, label, word]`` ends from the ``first`` one on, for every start."""
        # Starts in the library's order: by word, then by label.
        request, word, label = count.transpose(1, 2).nonzero(as_tuple=True)
        repeat = count[request, label, word]
        request, word, label, base = (
            torch.repeat_interleave(x, repeat) for x in (request, word, label, first[request, label, word])
        )
        nth = torch.arange(request.shape[0], device=request.device)
        nth -= torch.repeat_interleave(torch.cumsum(repeat, 0) - repeat, repeat)
        last = _nth_end(is_end, request, label, base + nth)
        inner = RangeMinimum(scores.within).of(request, label, word, last)
        edges = torch.minimum(scores.start[request, label, word], scores.end[request, label, last])
        return Candidates(request, word, last, label, torch.minimum(inner, edges))

    def _mentioned(self, scores: WordScores, group: Group) -> tuple[Candidates, torch.Tensor]:
        """Candidates among the mentions, and their number ``[B]``."""
        request, start, end = group.selections.mentions()
        threshold = group.threshold[request, None]
        inner = RangeMinimum(scores.within).of_all_labels(request, start, end)
        starts, ends = scores.start[request, :, start], scores.end[request, :, end]
        unbroken = inner > threshold if self.config.represent_spans else inner >= threshold
        above = (starts > threshold) & (ends > threshold) & unbroken
        count = torch.zeros_like(group.num_words).index_add_(0, request, above.sum(1))
        mention, label = above.nonzero(as_tuple=True)
        score = torch.minimum(inner, torch.minimum(starts, ends))[mention, label]
        return Candidates(request[mention], start[mention], end[mention], label, score), count

    def _rescore(self, pairs: Candidates, group: Group, limits: _Limits, finite: torch.Tensor) -> Found:
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
        spans_of = (pairs.request[pair], pairs.start[pair], pairs.end[pair])
        found = Candidates(*spans_of, label, score[pair, label])
        selections = group.selections
        if not selections.top:
            return Found(found)
        wanted = selections.candidate_labels() & selections.ranks[:, None]
        (hit,) = (above & wanted[pairs.request]).any(1).nonzero(as_tuple=True)
        request = pairs.request[hit]
        labels, scores = selections.rank(score[hit], request)
        return Found(found, Ranked(request, pairs.start[hit], pairs.end[hit], labels, scores))


def _ranked_pairs(pairs: Candidates, scores: WordScores, group: Group) -> Ranked:
    """Ranked labels of the spans with a candidate: the lowest of the scores that make a label's span."""
    selections = group.selections
    wanted = selections.candidate_labels() & selections.ranks[:, None]
    hit = wanted[pairs.request, pairs.label]
    spans = torch.unique(torch.stack(pairs[:3])[:, hit], dim=1)
    minimum = RangeMinimum(scores.within)
    labels, best = [], []
    for request, start, end in (part.unbind() for part in spans.split(_span_step(group), dim=1)):
        edges = torch.minimum(scores.start[request, :, start], scores.end[request, :, end])
        score = torch.minimum(minimum.of_all_labels(request, start, end), edges)
        label, value = selections.rank(score, request)
        labels.append(label)
        best.append(value)
    request, start, end = spans.unbind()
    return Ranked(request, start, end, torch.cat(labels), torch.cat(best))


def _span_step(group: Group) -> int:
    return max(1, LOGIT_BUDGET // group.labels.shape[1])


def _in_library_order(found: Candidates) -> Candidates:
    """Sorted by request, first word, label, last word."""
    order = torch.arange(found.request.shape[0], device=found.request.device)
    for column in (found.end, found.label, found.start, found.request):
        order = order[torch.sort(column[order], stable=True).indices]
    return Candidates(*(column[order] for column in found))


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


#: No rows: start, end, label and score.
_EMPTY = (*np.empty((3, 0), np.int32), np.empty(0, np.float32))


def _result(
    indices: np.ndarray, scores: np.ndarray, selection: Selection, ranked: tuple[np.ndarray, ...]
) -> PoolerResult:
    """``[3, N]`` start, end, label and ``[N]`` scores, as the decoder wants them, and the ranking if asked for."""
    rows = (*indices.astype(np.int32), scores.astype(np.float32))
    return PoolerResult(Status.OK, rows + ranked if selection.top else rows)


def _nothing(selection: Selection) -> PoolerResult:
    """The result of a request without words."""
    return PoolerResult(Status.OK, _EMPTY + _EMPTY if selection.top else _EMPTY)


def check_kinds(arrays: Sequence[np.ndarray], *accepted: str) -> None:
    """Refuse arrays that are not of one of the accepted sequences of dtype kinds.

    Raises:
        TransportError: They are not.
    """
    kinds = "".join(a.dtype.kind for a in arrays)
    if kinds not in accepted:
        raise TransportError(f"arrays of kinds {kinds!r}; expected {' or '.join(accepted)}")


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


class RangeMinimum:
    """Minima of ``[B, C, W]`` values over ranges of words, from a table of minima over powers of two."""

    def __init__(self, values: torch.Tensor) -> None:
        levels = [values]
        for level in range((values.shape[-1] - 1).bit_length()):
            shift = min(2**level, values.shape[-1] - 1)
            shifted = torch.cat([levels[-1][..., shift:], levels[-1][..., :shift]], dim=-1)
            levels.append(torch.minimum(levels[-1], shifted))
        self._table = torch.stack(levels)

    def of(
        self, request: torch.Tensor, label: torch.Tensor, first: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """``[N]``: minimum of ``values[request, label, first : last + 1]``."""
        exponent, right = self._halves(first, last)
        table = self._table
        return torch.minimum(table[exponent, request, label, first], table[exponent, request, label, right])

    def of_all_labels(self, request: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """``[N, C]``: the same for every label."""
        exponent, right = self._halves(first, last)
        table = self._table
        return torch.minimum(table[exponent, request, :, first], table[exponent, request, :, right])

    @staticmethod
    def _halves(first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exponent = torch.floor(torch.log2((last - first + 1).double())).long()
        return exponent, last - 2**exponent + 1
