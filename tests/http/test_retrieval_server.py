"""A real server of the retrieval family: a published checkpoint, vectors, rankings, bad input among good."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from retrieval_harness import Golden, assert_same_vectors, each, request, vectors

pytestmark = pytest.mark.http
pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm_factory.serving.testing import running_server  # noqa: E402

COLBERTS = each(Golden("moderncolbert", "hidden"), Golden("lfm2_colbert", "hidden"))
EMBEDDERS = each(Golden("embeddinggemma", "mean"))

Served = tuple[Golden, httpx.Client]


@pytest.fixture(scope="module", params=[*COLBERTS, *EMBEDDERS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A checkpoint and a client of a server that our own command has started, with nothing but its directory."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with (
        running_server(request.param.path, "--max-num-seqs", "16", log=log) as running,
        httpx.Client(base_url=running.url, timeout=120, trust_env=False) as http,
    ):
        yield request.param, http


def post(client: httpx.Client, data: Any) -> httpx.Response:
    # By hand: httpx would refuse lone surrogates, which a client can send.
    body = json.dumps({"data": data}).encode()
    return client.post("/pooling", content=body, headers={"content-type": "application/json"})


def answer(client: httpx.Client, data: Any) -> Any:
    response = post(client, data)
    assert response.status_code == 200, response.text
    return response.json()["data"]


def test_64_mixed_requests_at_once_equal_the_library(served: Served) -> None:
    golden, client = served
    draw = random.Random(1)
    cases = [draw.choice(golden.meta()["cases"]) for _ in range(64)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda case: answer(client, {**request(case), "output": "base64"}), cases))
    for case, got in zip(cases, answers, strict=True):
        assert_same_vectors(vectors(got)[0], golden.arrays()[case["key"]], case["key"])


@pytest.mark.parametrize("served", COLBERTS, indirect=True)
def test_rankings_at_once_equal_the_library(served: Served) -> None:
    golden, client = served
    meta, scores = golden.meta(), golden.arrays()["scores"]
    asked = [{"query": query, "documents": meta["documents"]} for query in meta["queries"]] * 4
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda data: answer(client, data), asked))
    for index, got in enumerate(answers):
        found = {result["index"]: result["score"] for result in got["results"]}
        want = scores[index % len(meta["queries"])]
        np.testing.assert_allclose([found[i] for i in range(len(want))], want, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_all_forms_are_read_by_numpy_alone(served: Served, dtype: str) -> None:
    golden, client = served
    cases = golden.cases(is_query=False)[:3]
    asked = {"text": [case["text"] for case in cases], "is_query": False, "dtype": dtype}
    lists = answer(client, asked)
    base64 = answer(client, {**asked, "output": "base64"})
    # Not with each other to the last bit: the engine may have batched the two requests differently.
    for got in (vectors(lists), vectors(base64)):
        for vector, case in zip(got, cases, strict=True):
            np.testing.assert_allclose(vector, golden.arrays()[case["key"]], atol=5e-3, rtol=0)


BAD: list[tuple[Any, str]] = [
    ({}, "text: the field is required"),
    ({"text": []}, "text: an empty list"),
    ({"text": ["a", None]}, "text[1]: expected a string"),
    ({"text": "\ud800"}, "text: not valid Unicode"),
    ({"text": "a", "dtype": "float64"}, "dtype"),
    ({"text": "a", "prompt_name": "nope"}, "prompt_name"),
    ({"text": "a", "image": "data:"}, "image: unknown field"),
    ({"text": "a" * 1_000_001}, "text: 1000001 characters"),
]
BAD_FOR_COLBERTS: list[tuple[Any, str]] = [
    ({"text": "a", "pool_factor": 2, "is_query": True}, "pool_factor"),
    ({"query": "a", "documents": []}, "documents: an empty list"),
    ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ({"query": "a", "documents": ["word " * 60] * 1000, "similarity": True}, "similarity: up to"),
]
BAD_FOR_EMBEDDERS: list[tuple[Any, str]] = [
    ({"text": "a", "dimensions": 0}, "dimensions"),
    ({"text": "a", "dimensions": 25}, "dimensions: 25; this checkpoint's vectors have 24"),
    ({"text": "a", "pool_factor": 2}, "pool_factor: unknown field"),
]


def _refuses_and_goes_on(served: Served, table: list[tuple[Any, str]]) -> None:
    golden, client = served
    case = golden.cases(is_query=False)[0]
    for data, message in table:
        response = post(client, data)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
        assert_same_vectors(vectors(answer(client, request(case)))[0], golden.arrays()[case["key"]], message)


def test_bad_input_is_400_and_the_next_good_request_is_answered(served: Served) -> None:
    _refuses_and_goes_on(served, BAD)


@pytest.mark.parametrize("served", COLBERTS, indirect=True)
def test_what_is_bad_for_colberts_is_400_as_well(served: Served) -> None:
    _refuses_and_goes_on(served, BAD_FOR_COLBERTS)


@pytest.mark.parametrize("served", EMBEDDERS, indirect=True)
def test_what_is_bad_for_embedders_is_400_as_well(served: Served) -> None:
    _refuses_and_goes_on(served, BAD_FOR_EMBEDDERS)


def test_a_prompt_changed_on_its_way_is_refused(served: Served) -> None:
    body = {"data": {"text": "Tim Cook runs Apple", "is_query": True}, "truncate_prompt_tokens": 4}
    response = served[1].post("/pooling", json=body)
    assert response.status_code == 400, response.text
    assert "truncate_prompt_tokens" in response.json()["error"]["message"]


def test_a_request_of_vllm_s_own_hurts_nobody(served: Served) -> None:
    golden, client = served
    assert client.post("/pooling", json={"input": "one", "task": golden.spec.pooling_task}).status_code < 500
    case = golden.cases(is_query=False)[0]
    assert_same_vectors(vectors(answer(client, request(case)))[0], golden.arrays()[case["key"]])
