"""The rest of the GLiNER family through real servers: 64 mixed requests at once, and bad ones among them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from checkpoints import LABELS, TEXTS
from conftest import Library, each
from harness import assert_same_entities
from linking import CANDIDATES, TEMPLATE, by_template, layer, records, written

pytestmark = pytest.mark.http
pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm_factory.serving.testing import running_server  # noqa: E402

#: Checkpoints, and the layer of glinker's that they are, if any.
SERVED = {"mt5-span": None, "mmbert-span": None, "mmbert-token": 4, "linker-span": 3}
MODES: list[dict[str, Any]] = [
    {"threshold": 0.3},
    {"flat_ner": False, "threshold": 0.2},
    {"multi_label": True, "threshold": 0.3},
]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"text": "a"}, "labels: "),
    "a number": ({"text": 3, "labels": ["a"]}, "text: expected a string or a list of strings"),
    "threshold": ({"text": "a", "labels": ["a"], "threshold": 2}, "threshold: "),
    "unknown field": ({"text": "a", "labels": ["a"], "lables": 1}, "lables: unknown field"),
    "too long": ({"text": "word " * 9000, "labels": ["a"], "truncation": "error"}, "text: 9000 words"),
}
BAD_LINKS: dict[str, tuple[dict[str, Any], str]] = {
    "no candidates": ({"text": "a", "candidate_labels": []}, "candidate_labels: expected at least one"),
    "candidate": ({"text": "a", "candidate_labels": [{"name": "x"}]}, "candidate_labels[0]"),
    "template": ({"text": "a", "candidate_labels": ["a"], "template": "{x}"}, "template: "),
    "mention": ({"text": "a", "candidate_labels": ["a"], "mentions": [{"start": 0, "end": 2}]}, "mentions[0]"),
}


class Served(NamedTuple):
    """A server of one checkpoint, and the checkpoint."""

    name: str
    layer: int | None
    client: httpx.Client


@pytest.fixture(scope="module", params=each(SERVED))
def served(
    request: pytest.FixtureRequest, library: Library, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Each checkpoint as the library saved it: preparing it is part of what is tested."""
    scratch = tmp_path_factory.mktemp("server")
    flags = ("--cache-dir", str(scratch / "cache"))
    with (
        running_server(library.saved(request.param), *flags, log=scratch / "server.log") as running,
        httpx.Client(base_url=running.url, timeout=120, trust_env=False) as http,
    ):
        yield Served(request.param, SERVED[request.param], http)


def ask(client: httpx.Client, data: dict[str, Any]) -> httpx.Response:
    return client.post("/pooling", json={"data": data})


def test_64_mixed_requests_at_once(served: Served, library: Library) -> None:
    requests: list[dict[str, Any]] = [
        {"text": TEXTS[i % len(TEXTS)], "labels": LABELS[: 1 + i % len(LABELS)], **MODES[i % len(MODES)]}
        for i in range(64)
    ]
    if served.layer:
        for i in range(0, 64, 4):
            del requests[i]["labels"]
            requests[i] |= {"candidate_labels": CANDIDATES[: 3 + i % 7], "template": TEMPLATE}
    with ThreadPoolExecutor(64) as pool:
        responses = list(pool.map(lambda data: ask(served.client, data), requests))
    found = 0
    for data, response in zip(requests, responses, strict=True):
        assert response.status_code == 200, response.text
        got, want = response.json()["data"], reference(served, library, data)
        assert_same_entities(by_template(got) if "candidate_labels" in data else got, want)
        found += len(want)
    assert found > 64


def reference(served: Served, library: Library, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The library's answer to the request alone."""
    if "labels" in data:
        return library.reference(served.name).predict_entities(**data)  # type: ignore[no-any-return]
    mode = {key: data[key] for key in ("threshold", "flat_ner", "multi_label") if key in data}
    assert served.layer is not None
    linker = layer(library.saved(served.name), served.layer, **mode)
    (found,) = linker(texts=[data["text"]], candidates=[records(data["candidate_labels"])]).entities
    return written(found)


def test_bad_requests_are_refused_and_hurt_nobody(served: Served) -> None:
    for data, message in [*BAD.values(), *(BAD_LINKS.values() if served.layer else ())]:
        response = ask(served.client, data)
        assert response.status_code == 400, (data, response.text)
        assert message in response.json()["error"]["message"]
        good = ask(served.client, {"text": TEXTS[0], "labels": LABELS, "threshold": 0.2})
        assert good.status_code == 200
        assert good.json()["data"]


def test_lists_windows_and_usage_are_the_same_everywhere(served: Served) -> None:
    data = {"text": ["", TEXTS[0] + " word" * 100], "labels": LABELS, "threshold": 0.3, "include_usage": True}
    answer = ask(served.client, data).json()["data"]
    assert answer["entities"][0] == []
    assert answer["texts"][0]["windows"] == 0
    assert answer["texts"][1]["windows"] > 1
    assert all(e["text"] == data["text"][1][e["start"] : e["end"]] for e in answer["entities"][1])
    cut = ask(served.client, {**data, "truncation": "truncate"}).json()["data"]
    assert cut["texts"][1] == {"windows": 1, "truncated": True}
