"""Embedding models inside vLLM: vectors equal sentence-transformers', alone and among others."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_engine import engine

from retrieval_harness import (
    EMBEDDERS,
    Golden,
    ask,
    assert_refused,
    assert_same_vectors,
    each,
    request,
    vectors,
    vectors_together,
)
from vllm_factory.errors import CheckpointError
from vllm_factory.io.dense import DensePipeline
from vllm_factory.io.limits import Limits
from vllm_factory.pooling import transport

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="vLLM is not installed: make install")

#: Vectors of a request alone and in a crowd.
BATCH_TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=each(*EMBEDDERS))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Golden, Any]]:
    """A golden checkpoint and an engine that serves it."""
    golden: Golden = request.param
    with engine(golden.path, **golden.engine_options()) as llm:
        yield golden, llm


def test_vectors_equal_the_library_s(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    lengths = set()
    for case in golden.meta()["cases"]:
        response = ask(llm, **request(case))
        assert_same_vectors(vectors(response)[0], golden.arrays()[case["key"]], str(case))
        assert response["usage"]["prompt_tokens"] == response["embeddings"]["tokens"]
        lengths.add(response["embeddings"]["tokens"])
        longest = response["embeddings"]["tokens"] == llm.llm_engine.model_config.max_model_len
        assert longest or not response["embeddings"]["truncated"]
    assert len(lengths) > 10
    assert llm.llm_engine.model_config.max_model_len in lengths, "the long ones are cut"


def test_neighbours_change_nothing(served: tuple[Golden, Any]) -> None:
    """64 texts of all lengths, with all prompts and dimensions, given to the engine at once."""
    golden, llm = served
    model = llm.llm_engine.model_config
    pipeline = DensePipeline.read(
        str(golden.path), None, model.hf_config.hidden_size, model.max_model_len, Limits()
    )
    draw = random.Random(0)
    cases = [draw.choice(golden.meta()["cases"]) for _ in range(64)]
    for case, got in zip(cases, vectors_together(llm, pipeline, [request(case) for case in cases]), strict=True):
        np.testing.assert_allclose(got, vectors(ask(llm, **request(case)))[0], atol=BATCH_TOLERANCE, rtol=0)


def test_a_list_of_texts_equals_each_of_them(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    cases = [case for case in golden.cases(is_query=True) if "dimensions" not in case]
    got = vectors(ask(llm, text=[case["text"] for case in cases], is_query=True))
    assert len(got) == len(cases) > 10
    for case, vector in zip(cases, got, strict=True):
        assert_same_vectors(vector, golden.arrays()[case["key"]], case["text"])


def test_nothing_hurts_the_engine(served: tuple[Golden, Any]) -> None:
    """vLLM's own requests carry no blob; a blob may be anything; the next good request is answered."""
    golden, llm = served
    kind = DensePipeline.blob_kind

    def blob(*numbers: int, dtype: Any = np.int32) -> bytes:
        return transport.pack(kind, 0, (np.array(numbers, dtype),))

    bad = [
        b"",
        b"\xff" * 64,
        transport.pack(kind + 1, 0, (np.array([0, 3, 0], np.int32),)),
        transport.pack(kind, 0, ()),
        blob(0, 3),
        blob(0, 3, 0, dtype=np.int64),
        blob(25, 3, 0),
        blob(-1, 3, 0),
        blob(0, 4, 0),
        blob(0, 3, 3),
    ]
    assert_refused(llm, DensePipeline, bad)
    case = golden.meta()["cases"][0]
    assert_same_vectors(vectors(ask(llm, **request(case)))[0], golden.arrays()[case["key"]])


@pytest.mark.embeddinggemma
def test_a_gemma_that_looks_back_only_is_refused(tmp_path: Path) -> None:
    golden = EMBEDDERS[0]
    shutil.copytree(golden.path, tmp_path / "copy")
    file = tmp_path / "copy" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_bidirectional_attention": False}))
    with (
        pytest.raises(CheckpointError, match="use_bidirectional_attention is not set"),
        engine(tmp_path / "copy", **golden.engine_options()),
    ):
        pass
