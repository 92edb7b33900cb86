"""The GLiNER2 head: class scores, record counts and span candidates. Plain torch, no vLLM import.

A prompt holds the tasks of a schema, each with a prompt token ``[P]`` and one marker token for each child: a
label of a classification, an entity type, head and tail of a relation, a field of a structure. Behind them come
the words, first those of the structures' choices, then those of the text (gliner2 2.1.0, ``processor.py``).
All tasks of all requests of an engine step are counted, classified and unrolled into records together; spans are
scored in padded groups of bounded memory. The host waits for the device for the counts, and once a group.

The blob of a request holds, in this order (N tasks, C children of all tasks, W words):

0. ``int32 [N]`` the prompt token of each task;
1. ``uint8 [N]`` its :class:`TaskKind`;
2. ``int32 [N]`` its number of children;
3. ``int32 [C]`` the marker token of each child;
4. ``uint8 [C]`` its :class:`ChildKind`;
5. ``float32 [C]`` its threshold; spans of kind SPANS must reach it;
6. ``int32 [2 * choices]`` pairs of a child of kind CHOICES and a word whose score is wanted;
7. ``int32 [W]`` the token of each word; with mean or max pooling ``int32 [W + 1]``, where each word's tokens
   begin and the last one's end;
8. ``int32 [1]`` the first word of the text.

A result holds ``int32 [N]`` counts (0 for classifications), ``float32`` the probabilities of all classes in the
order of the children, and one entry a candidate of ``int32 child, record, start, end`` and ``float32 value``:
the score, or for attributes the logit. Candidates are sorted by child, record, start and end.

Shape legend: B requests of a group, W words, K widths, Q field vectors (one a record and child), D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import nn

from vllm_factory.errors import TransportError
from vllm_factory.poolers.gliner2_config import Gliner2Config
from vllm_factory.poolers.gliner2_counting import MAX_RECORDS, Records, counting_layer, mlp
from vllm_factory.poolers.ragged import gather, runs, table, upload
from vllm_factory.poolers.span_layers import SpanMarkerV0
from vllm_factory.pooling.protocol import PoolerResult, Status

#: Rows of the widest activation of one group (a row is four hidden sizes wide).
ROW_BUDGET = 2**16
#: Candidates that one request may have; more means that the threshold selects nothing in particular.
MAX_CANDIDATES = 2**18

DTYPES = ("i", "u", "i", "i", "u", "f", "i", "i", "i")


class TaskKind(IntEnum):
    """What a task's children are scored for."""

    #: Classes of which one is right.
    SOFTMAX = 0
    #: Classes of which each may be right.
    SIGMOID = 1
    #: Spans, in one record whatever the count says, as long as it is not zero.
    ENTITIES = 2
    #: Spans, in as many records as are counted.
    RECORDS = 3


class ChildKind(IntEnum):
    """Which scores of a child leave the device."""

    #: Those of spans of the text that reach the threshold.
    SPANS = 0
    #: Those of single words that the request names.
    CHOICES = 1
    #: The logits of spans that reach the threshold of another child (of kind SPANS) of the same task.
    ATTRIBUTE = 2


@dataclass(frozen=True, slots=True)
class Gliner2Request:
    """A checked blob; see the module's text."""

    prompts: np.ndarray
    kinds: np.ndarray
    sizes: np.ndarray
    markers: np.ndarray
    child_kinds: np.ndarray
    thresholds: np.ndarray
    choices: np.ndarray
    words: np.ndarray
    num_words: int
    text_start: int

    @property
    def task_of_child(self) -> np.ndarray:
        """``[C]``."""
        return np.repeat(np.arange(self.sizes.size), self.sizes)


@dataclass(frozen=True, slots=True)
class Step:
    """The tasks and children of all requests of an engine step, one behind the other, on the host.

    Attributes:
        request: ``[tasks]`` the request of each task.
        kinds: ``[tasks]``.
        prompts: ``[tasks]`` row of the hidden states.
        task: ``[children]`` the task of each child.
        markers: ``[children]`` row of the hidden states.
        child: ``[children]`` its number within its request.
    """

    request: np.ndarray
    kinds: np.ndarray
    prompts: np.ndarray
    task: np.ndarray
    markers: np.ndarray
    child: np.ndarray

    @classmethod
    def of(cls, starts: Sequence[int], requests: Sequence[Gliner2Request]) -> Step:
        """The step of ``requests`` whose first tokens are at ``starts``."""
        sizes = np.concatenate([r.sizes for r in requests])
        return cls(
            request=np.repeat(np.arange(len(requests)), [r.sizes.size for r in requests]),
            kinds=np.concatenate([r.kinds for r in requests]),
            prompts=np.concatenate([r.prompts + start for r, start in zip(requests, starts, strict=True)]),
            task=np.repeat(np.arange(sizes.size), sizes),
            markers=np.concatenate([r.markers + start for r, start in zip(requests, starts, strict=True)]),
            child=np.concatenate([np.arange(r.markers.size) for r in requests]),
        )

    @property
    def is_class(self) -> np.ndarray:
        """``[tasks]`` whether a task is a classification."""
        return self.kinds <= TaskKind.SIGMOID


@dataclass(frozen=True, slots=True)
class Queries:
    """The field vectors to score spans with: on the device, and what they are, on the host (all ``[Q]``)."""

    vectors: torch.Tensor
    request: np.ndarray
    child: np.ndarray
    record: np.ndarray

    def of(self, request: int) -> np.ndarray:
        """Those of one request, by child and record."""
        mine = np.flatnonzero(self.request == request)
        return mine[np.lexsort((self.record[mine], self.child[mine]))]


class Gliner2Pooler(nn.Module):
    """The head.

    Args:
        config: Its configuration.
        hidden_size: Width of the encoder's states.
    """

    task = "token_classify"
    blob_kind = 2

    def __init__(self, config: Gliner2Config, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.span_rep_layer = SpanMarkerV0(hidden_size, config.max_width)
        self.classifier = mlp([hidden_size, 2 * hidden_size, 1])
        self.count_pred = mlp([hidden_size, 2 * hidden_size, MAX_RECORDS])
        self.count_embed = counting_layer(config.counting_layer, hidden_size)

    def parse(self, arrays: Sequence[np.ndarray], num_tokens: int) -> Gliner2Request:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        if tuple(array.dtype.kind for array in arrays) != DTYPES:
            raise TransportError(f"arrays of dtype {[str(a.dtype) for a in arrays]}; expected {', '.join(DTYPES)}")
        prompts, kinds, sizes, markers, child_kinds, thresholds, choices, words, text_start = arrays
        num_words = words.size - int(self.pools_words)
        if text_start.size != 1 or not 0 <= text_start[0] < num_words:
            raise TransportError(f"{num_words} words, of which the text's first is {text_start.tolist()[:3]}")
        if choices.size % 2:
            raise TransportError("half a choice")
        request = Gliner2Request(
            prompts,
            kinds,
            sizes,
            markers,
            child_kinds,
            thresholds,
            choices.reshape(-1, 2),
            words,
            num_words,
            int(text_start[0]),
        )
        _check_tasks(request, num_tokens)
        _check_words(words, num_tokens, self.pools_words)
        _check_children(request)
        return request

    @property
    def pools_words(self) -> bool:
        """Whether a word's vector comes of all its tokens."""
        return self.config.token_pooling != "first"

    def pool(
        self, hidden_states: torch.Tensor, starts: Sequence[int], requests: Sequence[Gliner2Request]
    ) -> list[PoolerResult]:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        step = Step.of(starts, requests)
        classes = self._classify(hidden_states, step)
        counts, finite = self._count(hidden_states, step)
        usable = np.ones(len(requests), bool)
        np.logical_and.at(usable, step.request, finite)
        np.logical_and.at(usable, step.request[step.task], np.isfinite(classes))
        queries = self._queries(hidden_states, step, counts)
        spans = self._spans(hidden_states, starts, requests, queries)
        is_class = step.is_class[step.task]
        of_task, of_child = step.request, step.request[step.task]
        return [
            _result(counts[of_task == i], classes[is_class & (of_child == i)], spans[i], bool(usable[i]))
            for i in range(len(requests))
        ]

    def _classify(self, states: torch.Tensor, step: Step) -> np.ndarray:
        """``[children]`` float32 probabilities of classes; zeros for what is no class."""
        found = np.zeros(step.task.size, np.float32)
        children = np.flatnonzero(step.is_class[step.task])
        if not children.size:
            return found
        logits = self.classifier(states[upload(step.markers[children], states.device)]).squeeze(-1).float()
        tasks, sizes = np.unique(step.task[children], return_counts=True)
        index = table(np.split(np.arange(children.size), np.cumsum(sizes)[:-1]))
        mask = upload(index >= 0, states.device)
        padded = logits[upload(index, states.device).clamp(min=0)].masked_fill(~mask, -torch.inf)
        softmax = upload(step.kinds[tasks] == TaskKind.SOFTMAX, states.device)
        scores = torch.where(softmax[:, None], padded.softmax(-1), padded.sigmoid())
        found[children] = scores[mask].cpu().numpy()
        return found

    def _count(self, states: torch.Tensor, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """``[tasks]`` int32 number of records, 0 for classifications; and whether it is a number at all."""
        counts, finite = np.zeros(step.kinds.size, np.int32), np.ones(step.kinds.size, bool)
        tasks = np.flatnonzero(~step.is_class)
        if tasks.size:
            logits = self.count_pred(states[upload(step.prompts[tasks], states.device)])
            both = torch.stack([logits.argmax(-1), logits.isfinite().all(-1).long()]).cpu().numpy()
            counts[tasks], finite[tasks] = both[0], both[1] > 0
        return counts, finite

    def _queries(self, states: torch.Tensor, step: Step, counts: np.ndarray) -> Queries:
        wanted = np.where(step.kinds == TaskKind.ENTITIES, np.minimum(counts, 1), counts)[step.task]
        # Those of which most records are wanted come first; see the counting layers.
        order = np.argsort(-wanted, kind="stable")
        order = order[: np.count_nonzero(wanted)]
        wanted = wanted[order]
        alive = [int(np.count_nonzero(wanted > record)) for record in range(int(wanted.max(initial=0)))]
        children = np.concatenate([order[:rows] for rows in alive]) if alive else order
        record = np.repeat(np.arange(len(alive)), alive)
        task = step.task[children]
        by_record = np.lexsort((children, record, task))
        key = (task * MAX_RECORDS + record)[by_record]
        members = np.split(by_record, np.flatnonzero(np.diff(key)) + 1)
        fields = states[upload(step.markers[order], states.device)]
        vectors = self.count_embed(fields, Records(alive, members)) if alive else fields
        return Queries(vectors, step.request[task], step.child[children], record)

    def _spans(
        self,
        states: torch.Tensor,
        starts: Sequence[int],
        requests: Sequence[Gliner2Request],
        queries: Queries,
    ) -> list[PoolerResult]:
        results = [PoolerResult(Status.OK, _no_candidates()) for _ in requests]
        mine = {index: queries.of(index) for index in np.unique(queries.request).tolist()}
        size = states.shape[1]
        order = sorted(mine, key=lambda index: -requests[index].num_words)
        for first, last in runs([self._rows(requests[i], mine[i].size, size) for i in order], ROW_BUDGET):
            members = order[first:last]
            parts = self._parts(requests[members[0]], mine[members[0]].size, size) if len(members) == 1 else 1
            found = []
            for part in range(parts):
                rows = [np.array_split(mine[i], parts)[part] for i in members]
                group = _Group([requests[i] for i in members], rows, queries)
                words = self._words(states, [starts[i] for i in members], group.requests)
                found.append(self._candidates(words, queries.vectors, group))
            for index, each in zip(members, zip(*found, strict=True), strict=True):
                results[index] = _joined(each)
        return results

    def _parts(self, request: Gliner2Request, num_queries: int, hidden_size: int) -> int:
        """In how many parts the vectors of a request are scored that is too large for one."""
        # An attribute's spans are those of other children, so these stay together; they have one record only.
        if np.any(request.child_kinds == ChildKind.ATTRIBUTE):
            return 1
        rows = self._rows(request, num_queries, hidden_size)
        return min(-(-rows // ROW_BUDGET), rows // (request.num_words * self.config.max_width))

    def _rows(self, request: Gliner2Request, num_queries: int, hidden_size: int) -> int:
        """Rows of the widest activation: those of the span layer, or the scores if they need more."""
        scores = -(-num_queries // (4 * hidden_size))
        return request.num_words * self.config.max_width * max(1, scores)

    def _words(
        self, states: torch.Tensor, starts: Sequence[int], requests: Sequence[Gliner2Request]
    ) -> torch.Tensor:
        """``[B, W, D]``, zeros behind each request's last word."""
        rows = [request.words + start for request, start in zip(requests, starts, strict=True)]
        if not self.pools_words:
            return gather(states, upload(table(rows), states.device))
        return _pool_words(states, rows, self.config.token_pooling)

    def _candidates(self, words: torch.Tensor, vectors: torch.Tensor, group: _Group) -> list[PoolerResult]:
        device = words.device
        num_words = upload(group.num_words, device)
        spans = self.span_rep_layer(words, num_words).float()
        index = upload(group.index, device)
        logits = torch.einsum("bwkd,bqd->bqwk", spans, gather(vectors, index).float())
        start = torch.arange(words.shape[1], device=device)
        end = start[:, None] + torch.arange(self.config.max_width, device=device)
        inside = (index >= 0)[:, :, None, None] & (end < num_words[:, None, None])[:, None]
        score = torch.sigmoid(logits)
        keep = group.selected(score, inside)
        finite = (logits.isfinite() | ~inside).flatten(1).all(1)
        counts = keep.flatten(1).sum(1)
        keep &= (finite & (counts <= MAX_CANDIDATES))[:, None, None, None]
        request, query, first, width = keep.nonzero(as_tuple=True)
        value = torch.where(group.attributes(device)[..., None, None], logits, score)[request, query, first, width]
        places = torch.stack([request, query, first, first + width]).to(torch.int32).cpu().numpy()
        return group.results(places, value.cpu().numpy(), torch.stack([counts, finite.long()]).cpu().numpy())


class _Group:
    """Requests of one padded computation: what they want, on the host."""

    def __init__(self, requests: list[Gliner2Request], rows: list[np.ndarray], queries: Queries) -> None:
        self.requests = requests
        self.num_words = np.array([request.num_words for request in requests])
        #: ``[B, Q]`` positions among the field vectors, and the child and record of each.
        self.index = table(rows)
        self.child = table([queries.child[row] for row in rows], fill=0)
        self.record = table([queries.record[row] for row in rows], fill=0)
        self.kinds = np.stack([r.child_kinds[c] for r, c in zip(requests, self.child, strict=True)])

    def attributes(self, device: torch.device) -> torch.Tensor:
        """``[B, Q]`` whether a vector belongs to an attribute."""
        return upload(self.kinds == ChildKind.ATTRIBUTE, device)

    def selected(self, score: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """``[B, Q, W, K]``: whether a score is wanted."""
        device = score.device
        thresholds = np.stack([r.thresholds[c] for r, c in zip(self.requests, self.child, strict=True)])
        text_start = upload(np.array([r.text_start for r in self.requests]), device)
        in_text = torch.arange(score.shape[2], device=device) >= text_start[:, None]
        above = inside & in_text[:, None, :, None] & (score >= upload(thresholds, device)[..., None, None])
        keep = above & upload(self.kinds == ChildKind.SPANS, device)[..., None, None]
        if np.any(self.kinds == ChildKind.ATTRIBUTE):
            keep |= self._of_attributes(keep)
        keep[tuple(upload(index, device) for index in self._choices())] = True
        return keep

    def _of_attributes(self, keep: torch.Tensor) -> torch.Tensor:
        """Spans that attributes describe: those kept for the other children of the attributes' task."""
        described, describing = np.zeros((2, *self.index.shape), bool)
        for line, (request, child) in enumerate(zip(self.requests, self.child, strict=True)):
            task = request.task_of_child
            with_attributes = np.unique(task[request.child_kinds == ChildKind.ATTRIBUTE])
            described[line] = np.isin(task[child], with_attributes) & (self.index[line] >= 0)
            describing[line] = described[line] & (self.kinds[line] == ChildKind.ATTRIBUTE)
        any_span = (keep & upload(described, keep.device)[..., None, None]).any(1, keepdim=True)
        return any_span & upload(describing, keep.device)[..., None, None]

    def _choices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Request, vector, word and width of each score that choices need."""
        found: list[np.ndarray] = [np.zeros((0, 4), np.int64)]
        for line, request in enumerate(self.requests):
            child = np.where(self.index[line] >= 0, self.child[line], -1)
            choice, query = np.nonzero(request.choices[:, :1] == child[None])
            word = request.choices[choice, 1]
            found.append(np.stack([np.full_like(query, line), query, word, np.zeros_like(query)], axis=1))
        lines, queries, words, widths = np.concatenate(found).T
        return lines, queries, words, widths

    def results(self, places: np.ndarray, values: np.ndarray, totals: np.ndarray) -> list[PoolerResult]:
        """``[4, n]`` request, vector, start and end, ``[n]`` values, ``[2, B]`` candidates and finiteness."""
        line, query, start, end = places
        child, record = self.child[line, query], self.record[line, query]
        columns = np.stack([child, record, start, end]).astype(np.int32)
        bounds = np.searchsorted(line, np.arange(len(self.requests) + 1))
        found = []
        for first, last, count, finite in zip(bounds[:-1], bounds[1:], *totals.tolist(), strict=True):
            if not finite:
                found.append(PoolerResult(Status.NOT_FINITE))
            elif count > MAX_CANDIDATES:
                found.append(PoolerResult(Status.TOO_MANY))
            else:
                arrays = (*columns[:, first:last], values[first:last].astype(np.float32))
                found.append(PoolerResult(Status.OK, arrays))
        return found


def _result(counts: np.ndarray, classes: np.ndarray, spans: PoolerResult, usable: bool) -> PoolerResult:
    if not usable:
        return PoolerResult(Status.NOT_FINITE)
    if spans.status is not Status.OK:
        return spans
    return PoolerResult(Status.OK, (counts, classes, *spans.arrays))


def _joined(parts: Sequence[PoolerResult]) -> PoolerResult:
    """The parts of one request's vectors, in their order."""
    failed = next((part for part in parts if part.status is not Status.OK), None)
    if failed is not None or len(parts) == 1:
        return failed or parts[0]
    arrays = tuple(np.concatenate(column) for column in zip(*(part.arrays for part in parts), strict=True))
    return PoolerResult(Status.TOO_MANY) if arrays[0].size > MAX_CANDIDATES else PoolerResult(Status.OK, arrays)


def _no_candidates() -> tuple[np.ndarray, ...]:
    return (*np.zeros((4, 0), np.int32), np.zeros(0, np.float32))


def _check_tasks(request: Gliner2Request, num_tokens: int) -> None:
    count = request.prompts.size
    if not count or request.kinds.size != count or request.sizes.size != count or request.sizes.min() < 1:
        raise TransportError(f"{count} prompt tokens, {request.kinds.size} kinds, {request.sizes.size} sizes")
    if request.kinds.max() > max(TaskKind):
        raise TransportError(f"a task of kind {request.kinds.max()}")
    # In 64 bits: sizes that only seem to add up must not pass.
    total = int(request.sizes.sum(dtype=np.int64))
    if not total == request.markers.size == request.child_kinds.size == request.thresholds.size:
        raise TransportError(f"{total} children, {request.markers.size} markers")
    tokens = np.concatenate([request.prompts, request.markers])
    if tokens.min() < 0 or tokens.max() >= num_tokens:
        raise TransportError(f"a marker is outside the prompt of {num_tokens} tokens")


def _check_words(words: np.ndarray, num_tokens: int, bounds: bool) -> None:
    if words.min() < 0 or words.max() > num_tokens - int(not bounds):
        raise TransportError(f"a word is outside the prompt of {num_tokens} tokens")
    if bounds and np.any(np.diff(words) < 1):
        raise TransportError("a word without tokens")


def _check_children(request: Gliner2Request) -> None:
    if request.child_kinds.max() > max(ChildKind) or not np.isfinite(request.thresholds).all():
        raise TransportError(f"a child of kind {request.child_kinds.max()}, or a threshold that is no number")
    attributes = request.child_kinds == ChildKind.ATTRIBUTE
    if np.any(request.kinds[request.task_of_child[attributes]] != TaskKind.ENTITIES):
        raise TransportError("attributes of something else than entities")
    if not request.choices.size:
        return
    child, word = request.choices.T
    if child.min() < 0 or child.max() >= request.child_kinds.size:
        raise TransportError("a choice of no child")
    if np.any(request.child_kinds[child] != ChildKind.CHOICES) or word.min() < 0 or word.max() >= request.num_words:
        raise TransportError("a choice of a child without choices, or outside the words")


def _pool_words(states: torch.Tensor, bounds: list[np.ndarray], mode: str) -> torch.Tensor:
    """Mean or maximum over each word's tokens; ``bounds`` are ``[W + 1]`` rows of ``states`` a request."""
    longest = max(line.size for line in bounds) - 1
    tokens = np.concatenate([np.arange(line[0], line[-1]) for line in bounds])
    words = [np.repeat(np.arange(line.size - 1), np.diff(line)) + i * longest for i, line in enumerate(bounds)]
    target = upload(np.concatenate(words), states.device).unsqueeze(-1).expand(-1, states.shape[1])
    pooled = states.new_zeros(len(bounds) * longest, states.shape[1])
    reduce = "mean" if mode == "mean" else "amax"
    pooled.scatter_reduce_(0, target, states[upload(tokens, states.device)], reduce, include_self=False)
    return pooled.view(len(bounds), longest, -1)
