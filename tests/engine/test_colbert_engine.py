"""ColBERT inside vLLM: vectors and scores equal PyLate's, alone and among others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_engine import engine

from retrieval_harness import (
    COLBERTS,
    Golden,
    ask,
    assert_refused,
    assert_same_vectors,
    decoded,
    each,
    raw_vectors,
    request,
    vectors,
    vectors_together,
)
from vllm_factory.errors import UnsupportedError
from vllm_factory.io.colbert import ColbertPipeline
from vllm_factory.io.limits import Limits
from vllm_factory.poolers import multivector
from vllm_factory.poolers.multivector import maxsim
from vllm_factory.pooling import transport

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="vLLM is not installed: make install")

#: Vectors of a request alone and in a crowd.
BATCH_TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=each(*COLBERTS))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Golden, Any]]:
    """A golden checkpoint and an engine that serves it."""
    golden: Golden = request.param
    with engine(golden.path, **golden.engine_options()) as llm:
        yield golden, llm


def test_vectors_equal_the_library_s(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    for case in golden.meta()["cases"]:
        response = ask(llm, **request(case))
        assert_same_vectors(vectors(response)[0], golden.arrays()[case["key"]], case["key"])
        tokens = golden.arrays().get(f"{case['key']}_ids")
        if tokens is not None:
            assert response["usage"]["prompt_tokens"] == response["embeddings"]["tokens"] == len(tokens)


def test_neighbours_change_nothing(served: tuple[Golden, Any]) -> None:
    """64 prompts, queries and documents of all lengths, given to the engine at once."""
    golden, llm = served
    draw = random.Random(0)
    cases = [draw.choice(golden.cases(pool_factor=1)) for _ in range(64)]
    pipeline = ColbertPipeline.read(str(golden.path), None, llm.llm_engine.model_config.max_model_len, Limits())
    for case, got in zip(cases, vectors_together(llm, pipeline, [request(case) for case in cases]), strict=True):
        np.testing.assert_allclose(got, vectors(ask(llm, **request(case)))[0], atol=BATCH_TOLERANCE, rtol=0)


def test_scores_equal_the_library_s(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    meta, scores = golden.meta(), golden.arrays()["scores"]
    for index, query in enumerate(meta["queries"]):
        results = ask(llm, query=query, documents=meta["documents"])["results"]
        assert [r["score"] for r in results] == sorted((r["score"] for r in results), reverse=True)
        got = {result["index"]: result["score"] for result in results}
        np.testing.assert_allclose([got[i] for i in range(len(got))], scores[index], rtol=1e-4)


def test_scores_are_the_same_where_the_query_is_not(served: tuple[Golden, Any], monkeypatch: Any) -> None:
    golden, llm = served
    meta = golden.meta()
    pooler = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner.model.pooler.pooler
    scored: list[int] = []

    def counted(*arguments: Any) -> Any:
        scored.append(len(arguments[0]))
        return maxsim(*arguments)

    monkeypatch.setattr(multivector, "maxsim", counted)
    want = ask(llm, query=meta["queries"][0], documents=meta["documents"])["results"]
    assert sum(scored) == len(meta["documents"]), "all of them beside the model"
    monkeypatch.setattr(pooler.queries, "numbers", 0)
    got = ask(llm, query=meta["queries"][0], documents=meta["documents"])["results"]
    assert [r["index"] for r in got] == [r["index"] for r in want]
    np.testing.assert_allclose([r["score"] for r in got], [r["score"] for r in want], rtol=1e-5)
    assert sum(scored) == len(meta["documents"]), "none of them, this time"


def test_similarities_add_up_to_the_score(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    query, document = "Who runs Apple?", golden.meta()["documents"][0]
    response = ask(llm, query=query, documents=[document], similarity=True, output="base64")
    (result,) = response["results"]
    matrix = decoded(result["similarity"])
    assert matrix.shape == (len(response["query"]["tokens"]), len(result["tokens"]))
    np.testing.assert_allclose(matrix.max(1).sum(), result["score"], rtol=1e-5)
    placed = [token for token in result["tokens"] if token["start"] is not None]
    assert placed
    assert all(document[token["start"] : token["end"]] == token["text"] for token in placed)


def test_nothing_hurts_the_engine(served: tuple[Golden, Any]) -> None:
    """vLLM's own requests carry no blob; a blob may be anything; the next good request is answered."""
    golden, llm = served
    kind = ColbertPipeline.blob_kind
    role = np.array([0, 0, 3], np.int64)
    bad = [
        b"",
        transport.pack(kind + 1, 0, (role, np.empty(0, np.int32))),
        transport.pack(kind, 0, (np.array([9, 0, 3], np.int64), np.empty(0, np.int32))),
        transport.pack(kind, 0, (np.array([0, 0, 4], np.int64), np.empty(0, np.int32))),
        transport.pack(kind, 0, (role, np.array([3], np.int32))),
        transport.pack(kind, 0, (role, np.array([1, 1], np.int32))),
    ]
    assert_refused(llm, ColbertPipeline, bad)
    case = golden.cases(pool_factor=1)[0]
    assert_same_vectors(vectors(ask(llm, **request(case)))[0], golden.arrays()[case["key"]])


LFM2 = [golden for golden in COLBERTS if golden.plugin == "lfm2_colbert"]


@pytest.mark.parametrize("served", each(*LFM2), indirect=True)
def test_a_convolution_never_reads_what_others_left_in_its_state(served: tuple[Golden, Any]) -> None:
    """Beginnings of one prompt, of 1, 2, 3 and more tokens, shuffled: the same vectors, as the model looks back."""
    _, llm = served
    longest = llm.llm_engine.model_config.max_model_len
    draw = random.Random(2)
    whole = [draw.randrange(4, 400) for _ in range(longest)]
    lengths = [1, 2, 3] * 12 + [draw.randrange(4, longest + 1) for _ in range(27)] + [longest]
    draw.shuffle(lengths)
    # Nothing of a query: those of its length would be searched for expansion tokens, of which there is none here.
    prompts = [whole[:length] for length in lengths]
    vectors_of = raw_vectors(llm, ColbertPipeline, prompts)
    reference = vectors_of[lengths.index(longest)]
    assert len({tuple(row) for row in reference.round(4).tolist()}) > longest // 2, "the tokens' vectors differ"
    for length, got in zip(lengths, vectors_of, strict=True):
        np.testing.assert_allclose(got, reference[:length], atol=BATCH_TOLERANCE, rtol=0)


@pytest.mark.parametrize("golden", each(LFM2[0]))
def test_prompts_are_never_split(golden: Golden) -> None:
    """Steps that have room for one long prompt only; and what would split prompts is refused at start."""
    options = golden.engine_options()
    with engine(golden.path, max_num_batched_tokens=options["max_model_len"], **options) as llm:
        assert not llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill
        cases = golden.cases(pool_factor=1)
        pipeline = ColbertPipeline.read(str(golden.path), None, options["max_model_len"], Limits())
        for case, got in zip(cases, vectors_together(llm, pipeline, list(map(request, cases))), strict=True):
            assert_same_vectors(got, golden.arrays()[case["key"]], case["key"])
    # (Prefix caching without chunks is refused by vLLM itself.)
    for refused in (["enable_chunked_prefill"], ["enable_chunked_prefill", "enable_prefix_caching"]):
        with (
            pytest.raises(UnsupportedError, match="(.*?)".join(refused).replace("_", "-")),
            engine(golden.path, **options, **dict.fromkeys(refused, True)),
        ):
            pass
