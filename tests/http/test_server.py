"""A real server, started by our own command: results, concurrency, bad input, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from checkpoints import LABELS, TEXTS
from conftest import Library
from harness import BATCH_TOLERANCE, assert_same_entities

pytestmark = [pytest.mark.http, pytest.mark.deberta_gliner]
pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm_factory.serving.testing import Server, running_server  # noqa: E402

# At threshold 0 even a random checkpoint finds something.
GOOD: dict[str, Any] = {"text": "Angela Merkel met Tim Cook.", "labels": ["person", "place"], "threshold": 0}


@pytest.fixture(scope="module")
def server(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves a checkpoint as the library saved it: preparing it is part of what is tested."""
    scratch = tmp_path_factory.mktemp("server")
    checkpoint = library.saved("span-v3")
    flags = ("--cache-dir", str(scratch / "cache"), "--max-num-seqs", "16")
    with running_server(checkpoint, *flags, log=scratch / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """A client of the server that ignores proxies."""
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
        yield http


def post(client: httpx.Client, data: Any, **fields: Any) -> httpx.Response:
    # By hand: httpx would refuse NaN and lone surrogates, which a client can send.
    body = json.dumps({"data": data, **fields}).encode()
    return client.post("/pooling", content=body, headers={"content-type": "application/json"})


def entities(client: httpx.Client, **data: Any) -> Any:
    response = post(client, data)
    assert response.status_code == 200, response.text
    return response.json()["data"]


def test_equals_the_library_over_http(client: httpx.Client, library: Library) -> None:
    for text in TEXTS:
        want = library.reference("span-v3").predict_entities(text, LABELS, threshold=0.3)
        got = entities(client, text=text, labels=LABELS, threshold=0.3)
        assert_same_entities(got, want)
        assert all(set(found) == {"text", "label", "score", "start", "end"} for found in got)


def mixed_requests() -> list[dict[str, Any]]:
    """32 requests that differ in everything."""
    kinds: list[dict[str, Any]] = [
        {},
        {"flat_ner": False, "threshold": 0.2},
        {"multi_label": True, "threshold": 0.3},
        {"truncation": "truncate"},
    ]
    texts: list[Any] = [*TEXTS, " ".join(TEXTS), TEXTS[:5], "", [""], " ".join(TEXTS[3:9])]
    return [
        {"text": texts[i % len(texts)], "labels": LABELS[: 1 + i % len(LABELS)], **kinds[i % len(kinds)]}
        for i in range(32)
    ]


def test_32_concurrent_mixed_requests_get_the_answers_they_get_alone(client: httpx.Client, server: Server) -> None:
    requests = mixed_requests()
    alone = [entities(client, **data) for data in requests]

    async def all_at_once() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False, limits=limits) as http:
            # The same id for all: a client may send what it likes, and every answer must still find its request.
            calls = [
                http.post("/pooling", json={"data": data}, headers={"X-Request-Id": "the-same"})
                for data in requests
            ]
            return await asyncio.gather(*calls)

    for data, response, want in zip(requests, asyncio.run(all_at_once()), alone, strict=True):
        assert response.status_code == 200, response.text
        got = response.json()["data"]
        pairs = [(got, want)] if isinstance(data["text"], str) else list(zip(got, want, strict=True))
        for one_got, one_want in pairs:
            assert_same_entities(one_got, one_want, tolerance=BATCH_TOLERANCE)


def test_usage_and_what_was_windowed_are_there_for_who_asks(client: httpx.Client) -> None:
    answer = entities(client, text=["Angela", "word " * 100], labels=["person"], include_usage=True)
    assert answer["usage"]["prompt_tokens"] > 100
    assert [text["windows"] for text in answer["texts"]] == [1, pytest.approx(5, abs=3)]
    assert not any(text["truncated"] for text in answer["texts"])


BAD_DATA: dict[str, tuple[Any, str]] = {
    "null": (None, "data"),
    "a string": ("x", "data"),
    "no text": ({"labels": ["a"]}, "text"),
    "no labels": ({"text": "a"}, "labels"),
    "text a number": ({**GOOD, "text": 1}, "text"),
    "labels empty": ({**GOOD, "labels": []}, "labels"),
    "labels not strings": ({**GOOD, "labels": [{"a": 1}]}, "labels[0]"),
    "10,000 labels": ({**GOOD, "labels": [f"label {i}" for i in range(10_000)]}, "labels"),
    "labels of too many tokens": ({**GOOD, "labels": [f"l{i}" for i in range(4_000)]}, "labels"),
    "label with a marker": ({**GOOD, "labels": ["a <<ENT>> b"]}, "labels[0]"),
    "5 MB of text": ({**GOOD, "text": "a b " * 1_250_000}, "text"),
    "lone surrogate": ({**GOOD, "text": "\ud800"}, "text"),
    "surrogate in a label": ({**GOOD, "labels": ["\udc00"]}, "labels[0]"),
    "surrogate in a key": ({**GOOD, "\ud800": 1}, "Unicode"),
    "threshold NaN": ({**GOOD, "threshold": float("nan")}, "threshold"),
    "threshold -1": ({**GOOD, "threshold": -1}, "threshold"),
    "threshold 2": ({**GOOD, "threshold": 2}, "threshold"),
    "threshold a string": ({**GOOD, "threshold": "0.5"}, "threshold"),
    "unknown field": ({**GOOD, "lables": []}, "lables"),
    "too long in error mode": ({**GOOD, "text": "word " * 900, "truncation": "error"}, "text"),
}


@pytest.mark.parametrize(("data", "field"), BAD_DATA.values(), ids=BAD_DATA)
def test_bad_input_is_400_with_the_field_and_hurts_nobody(data: Any, field: str, client: httpx.Client) -> None:
    response = post(client, data)
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]
    assert entities(client, **GOOD)


BAD_BODIES = {
    "not JSON": b"{",
    "empty": b"",
    "a list": b"[]",
    "not UTF-8": b"\xff\xfe",
    "deeply nested": b'{"data":' + b"[" * 3000 + b"]" * 3000 + b"}",
    "no data": b'{"model": null}',
    "an empty prompt": json.dumps({"data": GOOD, "truncate_prompt_tokens": 0}).encode(),
    "a cut prompt": json.dumps({"data": GOOD, "truncate_prompt_tokens": 3}).encode(),
    "another task": b'{"input": "x", "task": "embed"}',
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_bad_bodies_are_400_and_hurt_nobody(body: bytes, client: httpx.Client) -> None:
    assert client.post("/pooling", content=body, headers={"content-type": "application/json"}).status_code == 400
    assert entities(client, **GOOD)


DOCUMENTED: dict[str, dict[str, Any]] = {
    "NUL bytes": {**GOOD, "text": "a\x00b Angela\x00"},
    "NUL in a label": {**GOOD, "labels": ["per\x00son"]},
    "threshold 0": {**GOOD, "threshold": 0},
    "emoji only": {**GOOD, "text": "💛" * 500},
    "one long word": {**GOOD, "text": "x" * 50_000},
    "a long text": {**GOOD, "text": "word " * 3_000},
    "whitespace": {**GOOD, "text": " \n\u3000"},
    "a thousand texts": {**GOOD, "text": ["Angela"] * 1000},
}


@pytest.mark.parametrize("data", DOCUMENTED.values(), ids=DOCUMENTED)
def test_odd_but_valid_input_is_answered(data: dict[str, Any], client: httpx.Client) -> None:
    found = entities(client, **data)
    if isinstance(data["text"], str):
        assert all(e["text"] == data["text"][e["start"] : e["end"]] for e in found)
    assert entities(client, **GOOD)


PIECES = [
    "a",
    "Angela ",
    "\u0130",
    "💛",
    "\u0301",
    "\u200b",
    "\x00",
    "東京",
    "<<ENT>>",
    "\ud800",
    '"',
    "\\",
    "x" * 50,
]
FIELDS = ["text", "labels", "threshold", "flat_ner", "multi_label", "truncation", "include_usage", "task", "input"]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON (as Python writes it) can hold."""
    text = "".join(rng.choices(PIECES, k=rng.randint(0, 8)))
    plain = [None, True, False, 0, -1, 0.5, 2, float("nan"), float("inf"), 10 ** rng.randint(1, 400), text]
    if depth > 2 or rng.random() < 0.5:
        return rng.choice(plain)
    items = [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return items if rng.random() < 0.5 else dict.fromkeys(map(str, items), text)


def random_body(rng: random.Random) -> bytes:
    """A good request with some fields replaced or dropped, now and then with a damaged byte."""
    data = dict(GOOD)
    for field in rng.sample(FIELDS, rng.randint(1, 3)):
        data[field] = random_value(rng)
    for field in rng.sample(sorted(data), rng.randint(0, 1)):
        del data[field]
    body = bytearray(json.dumps({"data": data}).encode())
    if rng.random() < 0.15:
        body[rng.randrange(len(body))] = rng.randrange(256)
    return bytes(body)


def test_hundreds_of_random_requests_get_no_server_error(client: httpx.Client) -> None:
    rng = random.Random(20261130)
    for _ in range(300):
        body = random_body(rng)
        response = client.post("/pooling", content=body, headers={"content-type": "application/json"})
        assert response.status_code < 500, (body, response.text)
        assert "NaN" not in response.text or response.status_code == 400
    assert entities(client, **GOOD)


def test_clients_that_hang_up_leave_a_server_that_answers(server: Server, client: httpx.Client) -> None:
    for _ in range(8):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/pooling",
                json={"data": {**GOOD, "text": "word " * 30_000}},
                timeout=httpx.Timeout(30, read=0.05),
                trust_env=False,
            )
    assert entities(client, **GOOD)


def test_stock_requests_get_a_harmless_answer(client: httpx.Client) -> None:
    response = client.post("/pooling", json={"input": ["hello", "x"], "task": "token_classify"})
    assert response.status_code == 200
    assert [item["data"] for item in response.json()["data"]] == [[0.0], [0.0]]
    assert entities(client, **GOOD)


def test_the_server_is_still_the_same_process(server: Server, client: httpx.Client) -> None:
    """Last in the file: whatever the tests above sent, nothing has been restarted."""
    assert Path(f"/proc/{server.pid}").exists()
    assert client.get("/health").status_code == 200
