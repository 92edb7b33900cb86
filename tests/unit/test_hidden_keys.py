"""Attention with hidden tokens, against the same thing written out for one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from vllm_factory.models.hidden_keys import hidden_keys
from vllm_factory.varlen import Varlen

MASK, LENGTH, HEADS, SIZE = 9, 6, 2, 4
#: Two queries of full length, one of them with four hidden tokens; documents around them, one ending in the token.
SEQUENCES = [[1, 2, 3], [1, 2, MASK, MASK, MASK, MASK], [1, MASK, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, MASK], [1]]


def flat() -> tuple[torch.Tensor, Varlen]:
    ids = torch.tensor([token for sequence in SEQUENCES for token in sequence])
    return ids, Varlen([len(sequence) for sequence in SEQUENCES], ids.device)


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    causal: bool = False,
    spared: int = 0,
) -> torch.Tensor:
    """``[T, H, D]`` to ``[T, H * D]``, a row at a time."""
    rows = []
    start = 0
    for sequence in SEQUENCES:
        seen = len(sequence)
        if seen == LENGTH:
            while sequence[seen - 1] == MASK:
                seen -= 1
            seen = min(seen + spared, len(sequence))
        for i in range(len(sequence)):
            near = [start + j for j in range(seen) if window is None or abs(i - j) <= window]
            near = [j for j in near if not causal or j <= start + i]
            if not near:
                rows.append(torch.zeros(query[0].numel()))
                continue
            weights = torch.einsum("hd,jhd->hj", query[start + i], key[near]).mul(0.5).softmax(-1)
            rows.append(torch.einsum("hj,jhd->hd", weights, value[near]).flatten())
        start += len(sequence)
    return torch.stack(rows)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_equals_one_row_at_a_time(window: int | None, everything: bool) -> None:
    ids, varlen = flat()
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, len(ids), HEADS, SIZE, generator=generator)
    hidden = hidden_keys(ids, varlen, token=MASK, length=LENGTH, everything=everything)
    assert hidden is not None
    got = hidden.attend(query, key, value, scale=0.5, window=window)
    want = one_by_one(query, key, value, window)
    if not everything:
        assert hidden.rows is not None
        want = want[hidden.rows]
        assert hidden.rows.tolist() == list(range(3, 15)), "only the sequences of full length"
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_nothing_is_done_where_nothing_can_be_hidden() -> None:
    ids, varlen = torch.arange(5), Varlen([2, 3], torch.device("cpu"))
    assert hidden_keys(ids, varlen, token=MASK, length=LENGTH, everything=False) is None


@pytest.mark.parametrize("spared", [0, 1, 2])
@pytest.mark.parametrize("everything", [False, True])
def test_a_model_that_looks_back_sees_no_hidden_token_either(everything: bool, spared: int) -> None:
    ids, varlen = flat()
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(ids), 2 * HEADS, SIZE, generator=generator)
    key, value = torch.randn(2, len(ids), HEADS, SIZE, generator=generator)
    hidden = hidden_keys(ids, varlen, token=MASK, spared=spared, length=LENGTH, everything=everything)
    assert hidden is not None
    got = hidden.attend(query, key, value, scale=0.5, window=None, causal=True)
    twice = [torch.stack([x, x], 2).flatten(1, 2) for x in (key, value)]  # two heads of the query each
    want = one_by_one(query, twice[0], twice[1], None, causal=True, spared=spared)
    torch.testing.assert_close(got, want if hidden.rows is None else want[hidden.rows], atol=1e-6, rtol=0)
    visible = hidden.visible(len(ids))
    assert visible.tolist() == [not 5 + spared <= i < 9 for i in range(len(ids))]
