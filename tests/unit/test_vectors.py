"""Vectors in responses, read back by numpy alone; and fewer of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from retrieval_harness import decoded
from vllm_factory.io.token_pooling import pool_tokens
from vllm_factory.io.vectors import Output, VectorType, vector_item


@pytest.mark.parametrize("shape", [(3, 8), (1, 1), (0, 8), (16,)])
@pytest.mark.parametrize("output", ["float", "base64"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 5e-4), ("int8", 1 / 254)])
def test_numpy_reads_every_form(
    shape: tuple[int, ...], output: Output, dtype: VectorType, tolerance: float
) -> None:
    array = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    # As it travels.
    item = json.loads(json.dumps(vector_item(array, output, dtype)))
    assert item["shape"] == list(shape)
    assert item["dtype"] == dtype
    assert isinstance(item["data"], str) == (output == "base64")
    got = decoded(item)
    assert got.shape == shape
    np.testing.assert_allclose(got, array, atol=tolerance, rtol=0)


def test_rows_of_zeros_have_a_scale() -> None:
    item = vector_item(np.zeros((2, 3), np.float32), "base64", "int8")
    assert item["scale"] == 1.0
    assert not decoded(item).any()


def test_int8_uses_its_whole_range() -> None:
    item = vector_item(np.array([[0.1, -0.2]], np.float32), "float", "int8")
    assert item["data"] == [[64, -127]]


def test_token_pooling_keeps_the_first_and_means_the_alike() -> None:
    one, two = np.eye(2, 4, dtype=np.float32)
    vectors = np.stack([two, one, one, two, two])
    pooled = pool_tokens(vectors, 2)
    np.testing.assert_array_equal(pooled[0], two)
    assert sorted(map(tuple, pooled[1:])) == sorted(map(tuple, [one, two]))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_token_pooling_leaves_what_cannot_be_fewer(count: int) -> None:
    vectors = np.ones((count, 3), np.float32)
    np.testing.assert_array_equal(pool_tokens(vectors, 4), vectors)
