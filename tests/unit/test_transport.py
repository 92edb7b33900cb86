"""Blobs survive the journey, and nothing malformed is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vllm_factory.errors import TransportError
from vllm_factory.pooling.transport import pack, unpack

DTYPES = [np.uint8, np.uint16, np.int32, np.int64, np.float32]
ARRAYS = st.lists(st.sampled_from(DTYPES).flatmap(lambda d: hnp.arrays(d, st.integers(0, 20))), max_size=5)
BLOB = pack(1, 7, [np.arange(3, dtype=np.int32), np.ones(2, np.float32)])


@given(arrays=ARRAYS, kind=st.integers(0, 255), ticket=st.integers(0, 2**64 - 1), status=st.integers(0, 255))
def test_round_trip(arrays: list[np.ndarray], kind: int, ticket: int, status: int) -> None:
    blob = unpack(pack(kind, ticket, arrays, status), kind)
    assert (blob.kind, blob.ticket, blob.status) == (kind, ticket, status)
    for got, want in zip(blob.arrays, arrays, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@given(position=st.integers(0, len(BLOB) - 1), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read_within_bounds(position: int, value: int) -> None:
    damaged = bytearray(BLOB)
    damaged[position] = value
    try:
        blob = unpack(bytes(damaged), 1)
    except TransportError:
        return
    assert sum(array.nbytes for array in blob.arrays) <= len(BLOB)


@pytest.mark.parametrize("length", range(len(BLOB)))
def test_a_shortened_blob_is_refused(length: int) -> None:
    with pytest.raises(TransportError):
        unpack(BLOB[:length], 1)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (BLOB + b"x", "behind the last array"),
        ("text", "a blob is bytes"),
        (b"XX" + BLOB[2:], "magic"),
        (BLOB[:2] + b"\x09" + BLOB[3:], "version 9"),
        (pack(2, 7, []), "kind 2, expected 1"),
    ],
)
def test_refusals_say_why(blob: object, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        unpack(blob, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.int32), np.zeros(2, np.float64), np.zeros(2, object)])
def test_only_small_flat_arrays_are_packed(array: np.ndarray) -> None:
    with pytest.raises(TransportError, match="cannot pack"):
        pack(1, 0, [array])
