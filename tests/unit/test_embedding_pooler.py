"""The pooler of one vector a text, against the same thing written out for one text at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vllm_factory.errors import TransportError
from vllm_factory.poolers.embedding import POOLINGS, EmbeddingPooler
from vllm_factory.pooling.protocol import Status

WIDTH, OUT = 8, 6
LENGTHS = [1, 5, 3, 9]

#: Of one text's rows, of which the first ``skip`` belong to a prompt that is left out.
ONE_BY_ONE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "pooling_mode_cls_token": lambda rows, _: rows[0],
    "pooling_mode_max_tokens": lambda rows, skip: rows[skip:].max(0).values,
    "pooling_mode_mean_tokens": lambda rows, skip: rows[skip:].mean(0),
    "pooling_mode_mean_sqrt_len_tokens": lambda rows, skip: rows[skip:].sum(0) / (len(rows) - skip) ** 0.5,
    "pooling_mode_weightedmean_tokens": lambda rows, skip: (
        sum(i * row for i, row in enumerate(rows, 1) if i > skip) / sum(range(skip + 1, len(rows) + 1))
    ),
    "pooling_mode_lasttoken": lambda rows, _: rows[-1],
}


def run(pooler: EmbeddingPooler, hidden: torch.Tensor, dimensions: int = 0, skip: int = 0) -> list[np.ndarray]:
    starts = (np.cumsum(LENGTHS) - LENGTHS).tolist()
    requests = [pooler.parse((np.array([dimensions, n, min(skip, n - 1)], np.int32),), n) for n in LENGTHS]
    results = pooler.pool(hidden, starts, requests)
    assert all(result.status is Status.OK for result in results)
    return [result.arrays[1] for result in results]


def hidden_states() -> torch.Tensor:
    return torch.randn(sum(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("mode", POOLINGS)
def test_every_pooling(mode: str, skip: int) -> None:
    pooler = EmbeddingPooler([mode], nn.Identity(), WIDTH, normalize=False)
    hidden = hidden_states()
    start = 0
    for length, got in zip(LENGTHS, run(pooler, hidden, skip=skip), strict=True):
        want = ONE_BY_ONE[mode](hidden[start : start + length], min(skip, length - 1))
        np.testing.assert_allclose(got, want.numpy(), atol=1e-6)
        start += length


def test_several_poolings_are_joined() -> None:
    modes = ["pooling_mode_cls_token", "pooling_mode_mean_tokens"]
    joined = run(EmbeddingPooler(modes, nn.Identity(), 2 * WIDTH, normalize=False), hidden_states())
    parts = [run(EmbeddingPooler([mode], nn.Identity(), WIDTH, normalize=False), hidden_states()) for mode in modes]
    np.testing.assert_allclose(joined, np.concatenate(parts, axis=1), atol=1e-6)


@pytest.mark.parametrize("dimensions", [1, 4, OUT])
def test_fewer_dimensions_are_the_first_ones_normalised_again(dimensions: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, OUT).requires_grad_(False)
    pooler = EmbeddingPooler(["pooling_mode_mean_tokens"], head, OUT, normalize=True)
    whole, cut = run(pooler, hidden_states()), run(pooler, hidden_states(), dimensions)
    for vector, short in zip(whole, cut, strict=True):
        want = vector[:dimensions] / np.linalg.norm(vector[:dimensions])
        np.testing.assert_allclose(short, want, atol=1e-6)


def test_what_is_not_finite_costs_its_own_request() -> None:
    pooler = EmbeddingPooler(["pooling_mode_mean_tokens"], nn.Identity(), WIDTH, normalize=True)
    hidden = hidden_states()
    hidden[2] = torch.inf
    starts = (np.cumsum(LENGTHS) - LENGTHS).tolist()
    requests = [pooler.parse((np.array([0, n, 0], np.int32),), n) for n in LENGTHS]
    statuses = [result.status for result in pooler.pool(hidden, starts, requests)]
    assert statuses == [Status.OK, Status.NOT_FINITE, Status.OK, Status.OK]


@pytest.mark.parametrize(
    "arrays",
    [
        (),
        (np.array([0, 4], np.int32),),
        (np.array([0, 4, 0], np.int64),),
        (np.array([-1, 4, 0], np.int32),),
        (np.array([OUT + 1, 4, 0], np.int32),),
        (np.array([0, 5, 0], np.int32),),
        (np.array([0, 4, 4], np.int32),),
        (np.array([0, 4, -1], np.int32),),
    ],
)
def test_a_blob_that_does_not_fit_is_refused(arrays: Any) -> None:
    pooler = EmbeddingPooler(["pooling_mode_mean_tokens"], nn.Identity(), OUT, normalize=True)
    with pytest.raises(TransportError):
        pooler.parse(arrays, 4)
