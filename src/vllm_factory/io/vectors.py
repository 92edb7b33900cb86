"""How vectors stand in a response. Readable with numpy alone.

An item is ``{"shape": [n, d], "dtype": ..., "data": ...}``; a dense embedding's shape is ``[d]``. With ``"float"``,
``data`` is a list of numbers (a list of rows for two dimensions). With ``"base64"``, it is the base64 of the rows
one after the other, little endian, in ``dtype``::

    array = np.frombuffer(base64.b64decode(item["data"]), "<f4").reshape(item["shape"])    # float32
    array = np.frombuffer(base64.b64decode(item["data"]), "<f2").reshape(item["shape"])    # float16
    array = np.frombuffer(base64.b64decode(item["data"]), "i1").reshape(item["shape"]) * item["scale"]    # int8

``int8`` has one ``scale`` an item: the greatest magnitude becomes 127.
"""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np

Output = Literal["float", "base64"]
VectorType = Literal["float32", "float16", "int8"]

_LARGEST_INT8 = 127


def vector_item(array: np.ndarray, output: Output, dtype: VectorType) -> dict[str, Any]:
    """One item of a response.

    Args:
        array: float32 ``[n, d]`` or ``[d]``.
        output: Lists of numbers, or base64.
        dtype: What the numbers are rounded to.
    """
    item: dict[str, Any] = {"shape": list(array.shape), "dtype": dtype}
    if dtype == "int8":
        # Zeros alone (or no row at all) leave nothing to scale.
        scale = float(np.abs(array).max(initial=0.0)) / _LARGEST_INT8 or 1.0
        item["scale"] = scale
        array = np.rint(array / scale)
    rounded = array.astype({"float32": "<f4", "float16": "<f2", "int8": "i1"}[dtype])
    item["data"] = base64.b64encode(rounded.tobytes()).decode("ascii") if output == "base64" else rounded.tolist()
    return item


def unpacked(arrays: tuple[np.ndarray, ...] | list[np.ndarray]) -> np.ndarray:
    """A pooler's ``shape`` and ``data`` as one array, ``[n, d]`` or ``[d]``; a score is ``[]``."""
    shape, data = arrays
    return data.reshape(shape.tolist())
