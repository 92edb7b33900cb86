"""GLiNER2 inside vLLM, in this process: results, mixed schemas in one step, and blobs that nobody should send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.deberta_gliner2]
vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from test_engine import ask, engine  # noqa: E402
from vllm import PoolingParams  # noqa: E402

from checkpoints import TEXTS  # noqa: E402
from gliner2_checkpoints import SCHEMA  # noqa: E402
from gliner2_harness import Gliner2Library, assert_same_result, library_answer  # noqa: E402
from vllm_factory.errors import RequestError  # noqa: E402
from vllm_factory.pooling import transport  # noqa: E402
from vllm_factory.pooling.protocol import Status  # noqa: E402

DETAILS = {"include_confidence": True, "include_spans": True}


def test_equals_the_library_through_the_engine(gliner2_library: Gliner2Library) -> None:
    reference = gliner2_library.reference("lstm-v2")
    with engine(gliner2_library.prepared("lstm-v2")) as llm:
        want = [library_answer(reference, {"text": text, "schema": SCHEMA, **DETAILS}) for text in TEXTS]
        # One request, many prompts: the engine batches them as it likes.
        together = ask(llm, text=TEXTS * 2, schema=SCHEMA, **DETAILS)
        for got, expected in zip(together, want * 2, strict=True):
            assert_same_result(got, expected)
        data: dict[str, Any] = {"text": " ".join(TEXTS[:2]), "schema": SCHEMA, "chunk_size": 9, "chunk_overlap": 3}
        assert_same_result(ask(llm, **data), library_answer(reference, data))
        with pytest.raises(RequestError, match=r"schema.entities.a"):
            ask(llm, text="a", schema={"entities": {"a": 3}})
        _nothing_hurts_the_engine(llm)
        assert_same_result(ask(llm, text=TEXTS[0], schema=SCHEMA, **DETAILS), want[0])


def _nothing_hurts_the_engine(llm: Any) -> None:
    """vLLM's own requests and hostile blobs get an answer each, and so does everyone after them."""
    plain = llm.encode(["hello world", "x"], pooling_task="token_classify", use_tqdm=False)
    assert [output.outputs.data.tolist() for output in plain] == [[0.0], [0.0]]
    good = [
        np.zeros(1, np.int32),
        np.full(1, 3, np.uint8),
        np.ones(1, np.int32),
        np.zeros(1, np.int32),
        np.zeros(1, np.uint8),
        np.ones(1, np.float32),
        np.zeros(0, np.int32),
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
    ]
    assert _status(llm, good) is Status.OK
    for index, bad in {
        0: np.array([10**6], np.int32),
        1: np.array([9], np.uint8),
        2: np.array([2**31 - 1], np.int32),
        3: np.array([-1], np.int32),
        4: np.array([7], np.uint8),
        5: np.array([np.nan], np.float32),
        6: np.array([0, 0], np.int32),
        7: np.array([10**6], np.int32),
        8: np.array([1], np.int32),
    }.items():
        assert _status(llm, [*good[:index], bad, *good[index + 1 :]]) is Status.BAD_BLOB


def _status(llm: Any, arrays: list[np.ndarray]) -> Status:
    blob = transport.pack(2, 0, arrays)
    params = PoolingParams(task="token_classify", extra_kwargs={transport.EXTRA_KWARG: blob})
    (output,) = llm.encode("hello", params, pooling_task="token_classify", use_tqdm=False)
    return Status(transport.unpack(output.outputs.data.numpy().tobytes()).status)
