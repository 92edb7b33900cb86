"""GLiNER2 through a real server: mixed schemas at once, and bad requests among good ones."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.http, pytest.mark.deberta_gliner2]
pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from checkpoints import TEXTS  # noqa: E402
from gliner2_checkpoints import SCHEMA  # noqa: E402
from gliner2_harness import Gliner2Library, assert_same_result, library_answer  # noqa: E402
from vllm_factory.serving.testing import running_server  # noqa: E402

SCHEMAS: list[dict[str, Any]] = [
    SCHEMA,
    {"entities": ["person", "[E]"]},
    {"relations": ["works for"], "classifications": SCHEMA["classifications"]},
    {"structures": SCHEMA["structures"]},
    {"entities": [f"type {index}" for index in range(30)]},
]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": (
        {"text": "a", "schema": {"entities": {"a": {"x": 1}}}},
        "schema.entities.a: unknown field 'x'",
    ),
    "no schema": ({"text": "a"}, "expected either schema or labels"),
    "one label": (
        {"text": "a", "schema": {"classifications": [{"task": "t", "labels": ["a"]}]}},
        "schema.classifications[0].labels",
    ),
    "separator": ({"text": "a", "labels": ["[SEP_TEXT]"]}, "labels[0]"),
    "schema too long": ({"text": "a", "labels": ["word " * 5000]}, "labels: "),
}


@pytest.fixture(scope="module")
def client(gliner2_library: Gliner2Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server of a checkpoint as the library saved it: preparing it is part of what is tested."""
    scratch = tmp_path_factory.mktemp("server")
    checkpoint = gliner2_library.saved("lstm-v2")
    with (
        running_server(checkpoint, "--cache-dir", str(scratch / "cache"), log=scratch / "server.log") as running,
        httpx.Client(base_url=running.url, timeout=120, trust_env=False) as http,
    ):
        yield http


def test_64_mixed_requests_at_once(client: httpx.Client, gliner2_library: Gliner2Library) -> None:
    requests = [
        {"text": TEXTS[i % len(TEXTS)], "schema": SCHEMAS[i % len(SCHEMAS)], "threshold": 0.2 + i % 3 / 10}
        for i in range(64)
    ]
    details = {"include_confidence": True, "include_spans": True}
    with ThreadPoolExecutor(64) as pool:
        responses = list(pool.map(lambda data: client.post("/pooling", json={"data": data | details}), requests))
    for data, response in zip(requests, responses, strict=True):
        assert response.status_code == 200, response.text
        want = library_answer(gliner2_library.reference("lstm-v2"), data | details)
        assert_same_result(response.json()["data"], want)


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD)
def test_bad_requests_are_refused_and_hurt_nobody(data: dict[str, Any], message: str, client: httpx.Client) -> None:
    response = client.post("/pooling", json={"data": data})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    good = client.post("/pooling", json={"data": {"text": TEXTS[0], "labels": ["person"]}})
    assert good.status_code == 200
    assert set(good.json()["data"]) == {"entities"}
