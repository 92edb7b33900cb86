"""Blobs: how an io processor and its pooler talk through vLLM, in both directions.

Layout, little endian, no padding::

    magic      2 bytes   b"VF"
    version    1 byte    1
    kind       1 byte    which pooler the blob belongs to
    ticket     8 bytes   unsigned; travels to the engine and back, and names the request's state
    status     1 byte    0 towards the engine, a Status on the way back
    count      1 byte    number of arrays
    headers    5 bytes   per array: dtype code (1), number of elements (4)
    data                 the arrays, one after the other

Every length is checked before anything is read, and a blob must end where its arrays end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_factory.errors import TransportError

MAGIC = b"VF"
VERSION = 1
#: Key of the blob in ``PoolingParams.extra_kwargs``.
EXTRA_KWARG = "vllm_factory"

_PREAMBLE = struct.Struct("<2sBBQBB")
_ARRAY = struct.Struct("<BI")
_DTYPES: dict[int, np.dtype] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i4"),
    2: np.dtype("<f4"),
    3: np.dtype("<i8"),
    4: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
MAX_ARRAYS = 255


@dataclass(frozen=True, slots=True)
class Blob:
    """An unpacked blob; the arrays are read-only views of its bytes."""

    kind: int
    ticket: int
    status: int
    arrays: tuple[np.ndarray, ...]


def pack(kind: int, ticket: int, arrays: Sequence[np.ndarray], status: int = 0) -> bytes:
    """One blob of one-dimensional ``arrays`` of dtype uint8, uint16, int32, int64 or float32.

    Raises:
        TransportError: An array has another shape or dtype, or there are more than 255.
    """
    if len(arrays) > MAX_ARRAYS:
        raise TransportError(f"{len(arrays)} arrays; a blob holds at most {MAX_ARRAYS}")
    parts = [_PREAMBLE.pack(MAGIC, VERSION, kind, ticket, status, len(arrays))]
    for array in arrays:
        code = _CODES.get(array.dtype.newbyteorder("<"))
        if code is None or array.ndim != 1:
            raise TransportError(f"cannot pack an array of dtype {array.dtype} and {array.ndim} dimensions")
        parts.append(_ARRAY.pack(code, array.size))
    parts.extend(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays)
    return b"".join(parts)


def unpack(blob: bytes | memoryview, kind: int | None = None) -> Blob:
    """Read a blob, trusting nothing.

    Args:
        blob: The bytes.
        kind: The kind that the reader understands; ``None`` accepts any.

    Raises:
        TransportError: Wrong type, magic, version or kind, or any length that does not add up.
    """
    if not isinstance(blob, bytes | memoryview):
        raise TransportError(f"a blob is bytes, not {type(blob).__name__}")
    if len(blob) < _PREAMBLE.size:
        raise TransportError(f"{len(blob)} bytes are less than a preamble")
    magic, version, found_kind, ticket, status, count = _PREAMBLE.unpack_from(blob)
    if magic != MAGIC or version != VERSION:
        raise TransportError(f"magic {magic!r} version {version}; this package reads {MAGIC!r} version {VERSION}")
    if kind is not None and found_kind != kind:
        raise TransportError(f"blob of kind {found_kind}, expected {kind}")
    return Blob(found_kind, ticket, status, _read_arrays(blob, count))


def _read_arrays(blob: bytes | memoryview, count: int) -> tuple[np.ndarray, ...]:
    position = _PREAMBLE.size + count * _ARRAY.size
    if len(blob) < position:
        raise TransportError(f"{len(blob)} bytes end inside the headers of {count} arrays")
    arrays = []
    for index in range(count):
        code, size = _ARRAY.unpack_from(blob, _PREAMBLE.size + index * _ARRAY.size)
        dtype = _DTYPES.get(code)
        if dtype is None:
            raise TransportError(f"array {index} has the unknown dtype code {code}")
        end = position + size * dtype.itemsize
        if end > len(blob):
            raise TransportError(f"array {index} ends at byte {end} of {len(blob)}")
        arrays.append(np.frombuffer(blob, dtype, size, position))
        position = end
    if position != len(blob):
        raise TransportError(f"{len(blob) - position} bytes behind the last array")
    return tuple(arrays)
