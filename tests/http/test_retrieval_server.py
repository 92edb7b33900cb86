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

from retrieval_harness import Golden, assert_same_vectors, request, vectors

pytestmark = [pytest.mark.http, pytest.mark.moderncolbert]
pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm_factory.serving.testing import running_server  # noqa: E402

GOLDEN = Golden("moderncolbert", "hidden")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server that our own command has started, with nothing but the checkpoint's directory."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with (
        running_server(GOLDEN.path, "--max-num-seqs", "16", log=log) as running,
        httpx.Client(base_url=running.url, timeout=120, trust_env=False) as http,
    ):
        yield http


def post(client: httpx.Client, data: Any) -> httpx.Response:
    # By hand: httpx would refuse lone surrogates, which a client can send.
    body = json.dumps({"data": data}).encode()
    return client.post("/pooling", content=body, headers={"content-type": "application/json"})


def answer(client: httpx.Client, data: Any) -> Any:
    response = post(client, data)
    assert response.status_code == 200, response.text
    return response.json()["data"]


def test_64_mixed_requests_at_once_equal_the_library(client: httpx.Client) -> None:
    draw = random.Random(1)
    cases = [draw.choice(GOLDEN.meta()["cases"]) for _ in range(64)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda case: answer(client, {**request(case), "output": "base64"}), cases))
    for case, got in zip(cases, answers, strict=True):
        assert_same_vectors(vectors(got)[0], GOLDEN.arrays()[case["key"]], case["key"])


def test_rankings_at_once_equal_the_library(client: httpx.Client) -> None:
    meta, scores = GOLDEN.meta(), GOLDEN.arrays()["scores"]
    asked = [{"query": query, "documents": meta["documents"]} for query in meta["queries"]] * 4
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda data: answer(client, data), asked))
    for index, got in enumerate(answers):
        found = {result["index"]: result["score"] for result in got["results"]}
        want = scores[index % len(meta["queries"])]
        np.testing.assert_allclose([found[i] for i in range(len(want))], want, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_all_forms_are_read_by_numpy_alone(client: httpx.Client, dtype: str) -> None:
    texts = GOLDEN.meta()["documents"][:3]
    lists = answer(client, {"text": texts, "dtype": dtype})
    base64 = answer(client, {"text": texts, "dtype": dtype, "output": "base64"})
    for one, other, index in zip(vectors(lists), vectors(base64), range(3), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, GOLDEN.arrays()[f"document_{index}_none"], atol=5e-3, rtol=0)


BAD: list[tuple[Any, str]] = [
    ({}, "text: the field is required"),
    ({"text": []}, "text: an empty list"),
    ({"text": ["a", None]}, "text[1]: expected a string"),
    ({"text": "\ud800"}, "text: not valid Unicode"),
    ({"text": "a", "dtype": "float64"}, "dtype"),
    ({"text": "a", "pool_factor": 2, "is_query": True}, "pool_factor"),
    ({"text": "a", "prompt_name": "nope"}, "prompt_name"),
    ({"text": "a", "image": "data:"}, "image: unknown field"),
    ({"query": "a", "documents": []}, "documents: an empty list"),
    ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ({"query": "a", "documents": ["word " * 60] * 1000, "similarity": True}, "similarity: up to"),
    ({"text": "a" * 1_000_001}, "text: 1000001 characters"),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=[str(index) for index in range(len(BAD))])
def test_bad_input_is_400_and_the_next_good_request_is_answered(
    client: httpx.Client, data: Any, message: str
) -> None:
    response = post(client, data)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    assert vectors(answer(client, {"text": "one"}))[0].shape[1] == 16


def test_a_prompt_changed_on_its_way_is_refused(client: httpx.Client) -> None:
    body = {"data": {"text": "Tim Cook runs Apple", "is_query": True}, "truncate_prompt_tokens": 4}
    response = client.post("/pooling", json=body)
    assert response.status_code == 400, response.text
    assert "truncate_prompt_tokens" in response.json()["error"]["message"]
