"""The pooler of one vector a token: its rows, its scores, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vllm_factory.poolers.multivector as multivector
from vllm_factory.errors import TransportError
from vllm_factory.poolers.multivector import MultiVectorPooler, MultiVectorRequest, QueryCache, Role
from vllm_factory.pooling.protocol import Status

WIDTH, OUT = 12, 5


@pytest.fixture
def pooler() -> MultiVectorPooler:
    torch.manual_seed(0)
    return MultiVectorPooler(nn.Linear(WIDTH, OUT)).requires_grad_(False)


def states(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(lengths), WIDTH, generator=generator)
    return hidden, (np.cumsum(lengths) - lengths).tolist()


def parsed(
    pooler: MultiVectorPooler, length: int, role: Role, key: int = 0, skipped: Any = ()
) -> MultiVectorRequest:
    return pooler.parse((np.array([role, key, length], np.int64), np.array(skipped, np.int32)), length)


def plain(pooler: MultiVectorPooler, hidden: torch.Tensor, kept: list[int]) -> torch.Tensor:
    return torch.stack([nn.functional.normalize(pooler.head(hidden[i]), dim=0) for i in kept])


def rows(result: Any) -> np.ndarray:
    assert result.status is Status.OK
    shape, data = result.arrays
    return data.reshape(shape.tolist())


def test_rows_are_the_kept_tokens_normalised(pooler: MultiVectorPooler) -> None:
    lengths = [4, 1, 6]
    hidden, starts = states(lengths)
    skipped = [[1, 3], [], [0, 5]]
    requests = [parsed(pooler, n, Role.VECTORS, skipped=s) for n, s in zip(lengths, skipped, strict=True)]
    for index, result in enumerate(pooler.pool(hidden, starts, requests)):
        kept = [starts[index] + i for i in range(lengths[index]) if i not in skipped[index]]
        np.testing.assert_allclose(rows(result), plain(pooler, hidden, kept).numpy(), atol=1e-6)


def test_a_document_is_scored_in_the_step_of_its_query_and_later(pooler: MultiVectorPooler) -> None:
    lengths = [3, 7, 2, 5]
    hidden, starts = states(lengths)
    query = parsed(pooler, 3, Role.QUERY, key=8)
    documents = [parsed(pooler, n, Role.DOCUMENT, key=8, skipped=[0] if n > 2 else []) for n in lengths[1:]]
    first = pooler.pool(hidden, starts, [query, *documents])
    later = pooler.pool(hidden[3:], [s - 3 for s in starts[1:]], documents)
    asked = plain(pooler, hidden, [0, 1, 2])
    assert rows(first[0]).shape == (3, OUT)
    for index, results in enumerate(zip(first[1:], later, strict=True), 1):
        kept = [starts[index] + i for i in range(lengths[index]) if i or lengths[index] <= 2]
        want = (asked @ plain(pooler, hidden, kept).T).max(1).values.sum()
        for result in results:
            assert rows(result).shape == ()
            np.testing.assert_allclose(rows(result), want.numpy(), atol=1e-5)


def test_scores_do_not_depend_on_the_group(pooler: MultiVectorPooler, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 1, 9, 30, 2, 17, 4]
    hidden, starts = states(lengths)
    roles = [Role.QUERY, Role.QUERY, *[Role.DOCUMENT] * 5]
    keys = [1, 2, 1, 2, 1, 2, 1]
    requests = [parsed(pooler, n, r, k) for n, r, k in zip(lengths, roles, keys, strict=True)]
    want = [rows(result) for result in pooler.pool(hidden, starts, requests)[2:]]
    monkeypatch.setattr(multivector, "SCORE_BUDGET", 20)
    got = [rows(result) for result in pooler.pool(hidden, starts, requests)[2:]]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_document_without_its_query_returns_its_vectors(pooler: MultiVectorPooler) -> None:
    hidden, starts = states([4])
    (result,) = pooler.pool(hidden, starts, [parsed(pooler, 4, Role.DOCUMENT, key=77)])
    assert rows(result).shape == (4, OUT)


def test_a_document_without_vectors_scores_zero(pooler: MultiVectorPooler) -> None:
    hidden, starts = states([2, 3, 2])
    requests = [
        parsed(pooler, 2, Role.QUERY, 1),
        parsed(pooler, 3, Role.DOCUMENT, 1, [0, 1, 2]),
        parsed(pooler, 2, Role.DOCUMENT, 1),
    ]
    results = pooler.pool(hidden, starts, requests)
    assert rows(results[1]) == 0.0
    assert rows(results[2]) != 0.0
    assert rows(pooler.pool(hidden[2:5], [0], [requests[1]])[0]) == 0.0


def test_what_is_not_finite_costs_its_own_request(pooler: MultiVectorPooler) -> None:
    hidden, starts = states([2, 3, 2])
    hidden[3] = torch.nan
    requests = [parsed(pooler, n, Role.VECTORS) for n in (2, 3, 2)]
    statuses = [result.status for result in pooler.pool(hidden, starts, requests)]
    assert statuses == [Status.OK, Status.NOT_FINITE, Status.OK]


def test_half_precision_states_give_float32_rows(pooler: MultiVectorPooler) -> None:
    pooler.head = nn.Identity()
    hidden, starts = states([3])
    result = rows(pooler.pool(hidden.bfloat16(), starts, [parsed(pooler, 3, Role.VECTORS)])[0])
    np.testing.assert_allclose(np.linalg.norm(result, axis=1), 1.0, atol=1e-6)


def test_the_oldest_queries_leave_the_cache_first() -> None:
    cache = QueryCache(numbers=6)
    for key in (1, 2, 3):
        cache.put(key, torch.full((2, 1), float(key)))
    assert cache.get(1) is not None
    cache.put(4, torch.zeros(2, 1))
    assert [cache.get(key) is not None for key in (1, 2, 3, 4)] == [True, False, True, True]
    cache.put(4, torch.zeros(7, 1))
    assert cache.get(4) is None, "larger than the whole cache"


def test_a_prompt_of_unknown_length_is_taken_as_it_comes(pooler: MultiVectorPooler) -> None:
    request = pooler.parse((np.array([0, 0, 0], np.int64), np.array([1], np.int32)), 4)
    assert request.kept.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    "arrays",
    [
        (),
        (np.array([0, 0, 4], np.int64),),
        (np.array([0, 0, 4], np.int32), np.empty(0, np.int32)),
        (np.array([0, 0], np.int64), np.empty(0, np.int32)),
        (np.array([3, 0, 4], np.int64), np.empty(0, np.int32)),
        (np.array([-1, 0, 4], np.int64), np.empty(0, np.int32)),
        (np.array([0, 0, 5], np.int64), np.empty(0, np.int32)),
        (np.array([0, 0, 4], np.int64), np.array([4], np.int32)),
        (np.array([0, 0, 4], np.int64), np.array([-1], np.int32)),
        (np.array([0, 0, 4], np.int64), np.array([2, 1], np.int32)),
        (np.array([0, 0, 4], np.int64), np.array([1, 1], np.int32)),
    ],
)
def test_a_blob_that_does_not_fit_is_refused(pooler: MultiVectorPooler, arrays: Any) -> None:
    with pytest.raises(TransportError):
        pooler.parse(arrays, 4)
