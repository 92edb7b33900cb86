"""A real server of a model that reads texts and images: vectors, rankings, and what strangers send among them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import httpx
import numpy as np
import pytest

from image_files import LIMITS, PICTURES, REFUSED, uri
from retrieval_harness import Golden, assert_same_vectors, document, each, image_uri, request, vectors
from vllm_factory.io.limits import Limits

pytestmark = pytest.mark.http
pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm_factory.serving.testing import running_server  # noqa: E402

Served = tuple[Golden, httpx.Client]
GOLDENS = each(Golden("colqwen3", "narrow"), Golden("nemotron_colembed", "published"), Golden("collfm2", "tiles"))


@pytest.fixture(scope="module", params=GOLDENS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A checkpoint and a client of a server that our own command has started, with bounds and one allowed host."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with pytest.MonkeyPatch.context() as environment:
        for field in fields(Limits):
            if field.name.startswith(("max_image", "max_total")):
                environment.setenv(f"VLLM_FACTORY_{field.name.upper()}", str(getattr(LIMITS, field.name)))
        with (
            running_server(
                request.param.path, "--max-num-seqs", "16", "--image-hosts", "localhost:1", log=log
            ) as own,
            httpx.Client(base_url=own.url, timeout=120, trust_env=False) as http,
        ):
            yield request.param, http


def post(client: httpx.Client, data: Any) -> httpx.Response:
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


def test_rankings_of_texts_and_images_at_once_equal_the_library(served: Served) -> None:
    golden, client = served
    meta, scores = golden.meta(), golden.arrays()["scores"]
    documents = list(map(document, meta["documents"]))
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda q: answer(client, {"query": q, "documents": documents}), meta["queries"] * 2)
        )
    for index, got in enumerate(answers):
        found = {result["index"]: result["score"] for result in got["results"]}
        want = scores[index % len(meta["queries"])]
        np.testing.assert_allclose([found[i] for i in range(len(want))], want, rtol=1e-4, atol=1e-4)


def test_a_list_of_images_is_answered_in_order(served: Served) -> None:
    golden, client = served
    cases = [case for case in golden.meta()["cases"] if "image" in case and "text" not in case]
    got = answer(client, {"image": [image_uri(case["image"]) for case in cases], "dtype": "float16"})
    assert len(got["embeddings"]) == len(cases)
    for case, array in zip(cases, vectors(got), strict=True):
        np.testing.assert_allclose(array, golden.arrays()[case["key"]], atol=1e-3, rtol=0)


def test_images_of_all_kinds_are_answered(served: Served) -> None:
    """Every picture in the documentation's table, at once."""
    _, client = served
    with ThreadPoolExecutor(8) as pool:
        sent = [{"image": uri(make())} for make, _, _ in PICTURES.values()]
        answers = list(pool.map(lambda data: answer(client, data), sent))
    for got in answers:
        assert np.isfinite(vectors(got)[0]).all()


def test_what_is_no_image_is_400_and_its_neighbours_are_answered(served: Served) -> None:
    golden, client = served
    good = golden.meta()["cases"][0]
    bad = {
        **{name: ({"image": text}, message) for name, (text, message) in REFUSED.items()},
        "in a list": ({"image": [image_uri("dot.png"), REFUSED["truncated"][0]]}, "image[1]: "),
        "a document": ({"query": "a", "documents": ["b", {"image": "/etc/passwd"}]}, "documents[1].image: "),
        "loopback behind an allowed name": ({"image": "http://localhost:1/a.png"}, "image: "),
        "a list of none": ({"image": []}, "image: an empty list"),
        "an image that asks": ({"image": image_uri("dot.png"), "is_query": True}, "is_query: true with image"),
        "no string": ({"image": 3}, "image: expected a data URI or a URL"),
        "neither": ({}, "text: the field is required, or image"),
        "an empty document": ({"query": "a", "documents": [{}]}, "documents[0]: an empty object"),
        "an unknown field": ({"query": "a", "documents": [{"url": "x"}]}, "documents[0].url: unknown field"),
    }
    if golden.plugin != "nemotron_colembed":  # which cuts a text, as its library does
        bad["too long"] = ({"text": "word " * 9000}, "tokens; this server takes ")
    sent = [*bad.values(), *[(request(good), None)] * len(bad)]
    random.Random(0).shuffle(sent)
    with ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(lambda pair: post(client, pair[0]), sent))
    for (data, message), response in zip(sent, responses, strict=True):
        if message is None:
            assert_same_vectors(vectors(response.json()["data"])[0], golden.arrays()[good["key"]])
        else:
            assert response.status_code == 400, (data, response.text[:300])
            assert message in response.json()["error"]["message"], response.text[:300]
