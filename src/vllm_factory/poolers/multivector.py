"""One vector a token, and MaxSim beside the model. Plain torch, no vLLM import.

All requests of an engine step are computed at once: the rows that are kept are gathered, go through the head, and
are normalised. A document of a ranking request is scored right here against its query's vectors, which stay on the
device; then only the score leaves.

The blob of a request holds, in this order:

0. ``int64 [3]``: its :class:`Role`; the key under which query and documents of one request find each other; and
   how many tokens the prompt was sent with, 0 where that is not known (images);
1. ``int32 [S]``: tokens of the prompt that have no vector (the skip list), ascending.

A result holds ``int32 shape`` and ``float32 data``: ``[n, d]`` and the rows one after the other; or an empty shape
and one number, the score. A document whose query is not here (another engine, evicted, not computed yet) returns
its vectors, and the io processor computes the same score from them: always right, mostly cheap.

Shape legend: N kept rows of all requests, D their width, B documents of a group, L rows of a document, M rows of a
query.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vllm_factory.errors import TransportError
from vllm_factory.poolers.ragged import gather_rows, runs, upload
from vllm_factory.pooling.protocol import PoolerResult, Status

#: Query vectors that stay on the device, in numbers: 64 MiB of float32.
CACHED_NUMBERS = 2**24
#: Similarities of one group of documents: 64 MiB of float32.
SCORE_BUDGET = 2**24


class Role(IntEnum):
    """What becomes of a prompt's vectors."""

    #: They are returned.
    VECTORS = 0
    #: They are returned, and kept for the documents of the same request.
    QUERY = 1
    #: They are scored against the query's, if that is here; else returned.
    DOCUMENT = 2


@dataclass(frozen=True, slots=True)
class MultiVectorRequest:
    """A checked blob: role, key, and the prompt's tokens that have a vector (``[K]`` int64)."""

    role: Role
    key: int
    kept: np.ndarray


class QueryCache:
    """Vectors of the latest queries, oldest out first.

    Args:
        numbers: How many numbers it may hold.
    """

    def __init__(self, numbers: int = CACHED_NUMBERS) -> None:
        self.numbers = numbers
        self._held = 0
        self._vectors: OrderedDict[int, torch.Tensor] = OrderedDict()

    def put(self, key: int, vectors: torch.Tensor) -> None:
        """Keep a query's ``[M, D]``."""
        self._drop(key)
        self._vectors[key] = vectors
        self._held += vectors.numel()
        while self._held > self.numbers and self._vectors:
            self._drop(next(iter(self._vectors)))

    def get(self, key: int) -> torch.Tensor | None:
        """A query's ``[M, D]``, if it is still here."""
        if key in self._vectors:
            self._vectors.move_to_end(key)
        return self._vectors.get(key)

    def _drop(self, key: int) -> None:
        vectors = self._vectors.pop(key, None)
        if vectors is not None:
            self._held -= vectors.numel()


class MultiVectorPooler(nn.Module):
    """Head, normalisation and scores.

    Args:
        head: ``[N, hidden size]`` to ``[N, D]`` float32.
        normalize: Whether vectors get length one.
    """

    task = "token_embed"
    blob_kind = 3

    def __init__(self, head: nn.Module, *, normalize: bool = True) -> None:
        super().__init__()
        self.head = head
        self.normalize = normalize
        self.queries = QueryCache()

    def parse(self, arrays: Sequence[np.ndarray], num_tokens: int) -> MultiVectorRequest:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        if [a.dtype.str for a in arrays] != ["<i8", "<i4"] or arrays[0].size != 3:
            raise TransportError(f"arrays of dtype {[str(a.dtype) for a in arrays]}; expected int64 [3] and int32")
        (role, key, sent), skipped = arrays[0].tolist(), arrays[1]
        if role not in list(Role):
            raise TransportError(f"unknown role {role}")
        if sent not in (0, num_tokens):
            raise TransportError(f"a prompt of {sent} tokens arrived with {num_tokens}")
        if skipped.size and (skipped[0] < 0 or skipped[-1] >= num_tokens or (np.diff(skipped) <= 0).any()):
            raise TransportError(f"skipped tokens that are not ascending within the prompt's {num_tokens}")
        keep = np.ones(num_tokens, bool)
        keep[skipped] = False
        return MultiVectorRequest(Role(role), key, np.flatnonzero(keep))

    def pool(
        self, hidden_states: torch.Tensor, starts: Sequence[int], requests: Sequence[MultiVectorRequest]
    ) -> list[PoolerResult]:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        rows = np.concatenate([request.kept + start for request, start in zip(requests, starts, strict=True)])
        vectors = self.vectors(hidden_states[upload(rows, hidden_states.device)])
        bounds = np.cumsum([0, *(request.kept.size for request in requests)]).tolist()
        pieces = [vectors[a:b] for a, b in pairwise(bounds)]
        for request, piece in zip(requests, pieces, strict=True):
            if request.role is Role.QUERY:
                # A copy: a view would keep the whole step's rows on the device.
                self.queries.put(request.key, piece.clone())
        scored = self._scores(vectors, bounds, requests)
        return self._results(pieces, scored)

    def vectors(self, states: torch.Tensor) -> torch.Tensor:
        """``[N, hidden size]`` to ``[N, D]`` float32."""
        projected = self.head(states).float()
        return F.normalize(projected, p=2, dim=-1) if self.normalize else projected

    def _scores(
        self, vectors: torch.Tensor, bounds: list[int], requests: Sequence[MultiVectorRequest]
    ) -> dict[int, torch.Tensor]:
        """MaxSim of those documents whose query is here, by the request's index: ``[]`` float32 each."""
        queries = {i: self.queries.get(r.key) for i, r in enumerate(requests) if r.role is Role.DOCUMENT}
        found = [(i, query) for i, query in queries.items() if query is not None]
        # Neighbours of similar length: little of a group is padding.
        found.sort(key=lambda item: (item[1].shape[0], requests[item[0]].kept.size))
        sizes = [query.shape[0] * requests[i].kept.size for i, query in found]
        scores: dict[int, torch.Tensor] = {}
        for first, last in runs(sizes, SCORE_BUDGET):
            members = found[first:last]
            documents = [np.arange(bounds[i], bounds[i + 1]) for i, _ in members]
            group = maxsim([query for _, query in members], vectors, documents)
            scores.update(zip([i for i, _ in members], group, strict=True))
        return scores

    def _results(self, pieces: list[torch.Tensor], scored: dict[int, torch.Tensor]) -> list[PoolerResult]:
        """All numbers in one transfer, then cut apart on the host."""
        numbers = [scored[i].reshape(1) if i in scored else piece.reshape(-1) for i, piece in enumerate(pieces)]
        flat = torch.cat(numbers).cpu().numpy()
        results = []
        start = 0
        for index, piece in enumerate(pieces):
            shape: tuple[int, ...] = () if index in scored else tuple(piece.shape)
            data = flat[start : start + numbers[index].numel()]
            start += data.size
            if np.isfinite(data).all():
                results.append(PoolerResult(Status.OK, (np.array(shape, np.int32), data)))
            else:
                results.append(PoolerResult(Status.NOT_FINITE))
        return results


def maxsim(queries: Sequence[torch.Tensor], vectors: torch.Tensor, documents: Sequence[np.ndarray]) -> torch.Tensor:
    """Sum over a query's vectors of the greatest product with a vector of the document.

    Args:
        queries: ``[M, D]`` of each pair, float32.
        vectors: ``[N, D]`` float32, of all documents.
        documents: Rows of ``vectors`` that belong to each pair's document, ``[L]``.

    Returns:
        ``[B]`` float32; 0 for a document without vectors.
    """
    counts = upload(np.array([rows.size for rows in documents]), vectors.device)
    padded = gather_rows(vectors, documents)
    if padded.shape[1] == 0:
        return vectors.new_zeros(len(documents))
    # A padding row of a query has product zero with everything, and adds nothing.
    query = nn.utils.rnn.pad_sequence(list(queries), batch_first=True)
    products = torch.bmm(query, padded.transpose(1, 2))
    outside = torch.arange(padded.shape[1], device=vectors.device) >= counts[:, None]
    best = products.masked_fill(outside.unsqueeze(1), -torch.inf).amax(-1)
    return torch.where((counts > 0)[:, None], best, 0.0).sum(-1)
