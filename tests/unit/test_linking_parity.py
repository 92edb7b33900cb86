"""Linking and reranking against glinker's own layers: entities, scores, and ranked candidates."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from checkpoints import LABELS, TEXTS
from conftest import Library, each
from harness import BATCH_TOLERANCE, LocalEngine, assert_same_entities
from linking import CANDIDATES, TEMPLATE, by_template, layer, mentions, records, written
from vllm_factory.io.rerank import RerankPipeline
from vllm_factory.poolers.label_cache import LabelCache

LINKERS = ["linker-span", "linker-token", "linker-projected", "linker-spans"]
MODES: list[dict[str, Any]] = [
    {"threshold": 0.25},
    {"threshold": 0.2, "flat_ner": False},
    {"threshold": 0.3, "multi_label": True},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", each(LINKERS))
def test_links_what_glinker_links(name: str, mode: dict[str, Any], library: Library) -> None:
    reference = layer(library.saved(name), 3, **mode)
    engine = library.local(name)
    texts = TEXTS[:6]
    want = reference(texts=texts, candidates=[records(CANDIDATES)] * len(texts)).entities
    assert sum(map(len, want)) > 5
    got = engine.answer_together(
        [{"text": text, "candidate_labels": CANDIDATES, "template": TEMPLATE, **mode} for text in texts]
    )
    for one, expected in zip(got, want, strict=True):
        assert_same_entities(by_template(one), written(expected))
        for found in one:
            assert found["candidates"][0]["score"] >= found["candidates"][-1]["score"]
            assert len(found["candidates"]) == 5
            own = [c["score"] for c in found["candidates"] if c["entity_id"] == found["entity_id"]]
            assert not own or own == pytest.approx([found["score"]])


@pytest.mark.parametrize("name", each(["linker-span", "linker-projected"]))
def test_candidates_are_ranked_as_glinker_ranks_them(name: str, library: Library) -> None:
    """Span heads only: for the token-level one the library gives no probabilities of classes."""
    reference = layer(library.saved(name), 3, threshold=0.3)
    (want,) = reference(texts=[TEXTS[0]], candidates=[records(CANDIDATES)]).entities
    got = library.local(name).answer(
        text=TEXTS[0], candidate_labels=CANDIDATES, template=TEMPLATE, threshold=0.3, top_k=5
    )
    assert len(got) == len(want) > 1
    for one, expected in zip(got, want, strict=True):
        texts = {c["entity_id"]: f"{c['label']}: {c.get('description', '')}" for c in CANDIDATES}
        assert [texts[c["entity_id"]] for c in one["candidates"]] == list(expected.class_probs)
        scores = [c["score"] for c in one["candidates"]]
        np.testing.assert_allclose(scores, list(expected.class_probs.values()), atol=1e-4)


SPANS = [
    *((TEXTS[0].index(part), TEXTS[0].index(part) + len(part)) for part in ("Angela Merkel", "Tim Cook", "Apple")),
    *((TEXTS[0].index(part), TEXTS[0].index(part) + len(part)) for part in ("Cupertino", "met", "ngela")),
]


@pytest.mark.parametrize("threshold", [0.0, 0.2])
@pytest.mark.parametrize("name", each(LINKERS))
def test_only_mentions_are_linked_when_given(name: str, threshold: float, library: Library) -> None:
    """The last one begins inside a word: glinker drops it, and so do we, saying so."""
    reference = layer(library.saved(name), 3, threshold=threshold)
    (want,) = reference(
        texts=[TEXTS[0]], candidates=[records(CANDIDATES)], l1_entities=[mentions(TEXTS[0], SPANS)]
    ).entities
    assert want
    data = {
        "text": TEXTS[0],
        "candidate_labels": CANDIDATES,
        "template": TEMPLATE,
        "threshold": threshold,
        "mentions": [{"start": start, "end": end} for start, end in SPANS],
        "include_usage": True,
    }
    got = library.local(name).answer(**data)
    assert_same_entities(by_template(got["entities"]), written(want))
    assert got["texts"]["unaligned_mentions"] == [5]


@pytest.mark.parametrize("name", each(LINKERS))
def test_entities_of_types_are_linked_where_they_are_found(name: str, library: Library) -> None:
    """Entity types find the mentions, as glinker's first layer does; candidates compete for those alone."""
    model, reference = library.reference(name), layer(library.saved(name), 3, threshold=0.3)
    found = model.predict_entities(TEXTS[0], LABELS, threshold=0.3)
    spans = mentions(TEXTS[0], [(e["start"], e["end"]) for e in found])
    (links,) = reference(texts=[TEXTS[0]], candidates=[records(CANDIDATES)], l1_entities=[spans]).entities
    got = library.local(name).answer(
        text=TEXTS[0], labels=LABELS, candidate_labels=CANDIDATES, template=TEMPLATE, threshold=0.3
    )
    assert_same_entities(got, found)
    linked = [
        {**e, "score": e["link"]["score"], "entity_id": e["link"]["entity_id"]}
        for e in got
        if e["link"] is not None
    ]
    assert linked
    assert_same_entities(by_template(linked), written(links))
    assert all(e["candidates"][0] == e["link"] for e in got if e["link"] is not None and name == "linker-span")


def rerank_engine(library: Library) -> LocalEngine:
    """The reranker's pipeline on a head and an encoder that need no vLLM."""
    engine = LocalEngine(library.prepared("token-v3"))
    p = engine.pipeline
    engine.pipeline = RerankPipeline(p.config, p.tokenizer, p.max_tokens, p.cut_tokens, p.limits)
    return engine


@pytest.mark.modernbert_gliner_rerank
@pytest.mark.parametrize("spans", [None, SPANS], ids=["all spans", "mentions"])
@pytest.mark.parametrize("max_labels", [3, 20])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_reranks_as_glinker_does(
    mode: dict[str, Any], max_labels: int, spans: list[tuple[int, int]] | None, library: Library
) -> None:
    candidates = CANDIDATES[:-1]  # The last one holds the model's own separator.
    reference = layer(library.saved("token-v3"), 4, max_labels=max_labels, **mode)
    given = None if spans is None else [mentions(TEXTS[0], spans)]
    (want,) = reference(texts=[TEXTS[0]], candidates=[records(candidates)], l1_entities=given).entities
    extra = {} if spans is None else {"mentions": [{"start": a, "end": b} for a, b in spans]}
    got = rerank_engine(library).answer(
        text=TEXTS[0],
        candidate_labels=candidates,
        template=TEMPLATE,
        max_labels=max_labels,
        **mode,
        **extra,
    )
    assert want or spans
    assert_same_entities(by_template(got), written(want))


@pytest.mark.deberta_gliner_linker
@pytest.mark.parametrize("name", each(LINKERS))
def test_neighbours_windows_and_the_cache_change_nothing(name: str, library: Library) -> None:
    engine = library.local(name)
    cache = engine.network.head.label_cache
    long = " ".join(TEXTS[:5])
    requests: list[dict[str, Any]] = [
        {"text": TEXTS[0], "candidate_labels": CANDIDATES, "threshold": 0.3},
        {"text": TEXTS[0], "labels": LABELS[:2], "threshold": 0.3},
        {"text": TEXTS[1:3], "labels": LABELS, "candidate_labels": CANDIDATES[2:4], "multi_label": True},
        {
            "text": long,
            "candidate_labels": [f"{label} {i}" for i, label in enumerate(LABELS * 2)],
            "threshold": 0.6,
            "top_k": 2,
        },
        {"text": TEXTS[0], "candidate_labels": CANDIDATES, "mentions": [{"start": 0, "end": 13}], "threshold": 0.0},
        {"text": TEXTS[4], "candidate_labels": {"one": "a thing", "two": ""}, "flat_ner": False, "threshold": 0.1},
        {"text": "", "candidate_labels": ["x"]},
    ]
    alone = [engine.answer(**data) for data in requests]
    hits = cache.hits
    for order in (requests, requests[::-1], requests * 2):
        for data, got in zip(order, engine.answer_together(order), strict=True):
            assert_close(got, alone[requests.index(data)])
    assert cache.hits > hits
    kept = cache.max_bytes
    try:
        for size in (0, cache.width * 4 * 7):
            empty(cache, size)
            for data, want in zip(requests, alone, strict=True):
                assert_close(engine.answer(**data), want)
                assert cache.table.numel() * 4 <= size
    finally:
        empty(cache, kept)


def empty(cache: LabelCache, max_bytes: int) -> None:
    """Forget everything, and keep up to ``max_bytes`` from now on."""
    cache.__init__(cache.width, max_bytes)  # type: ignore[misc]


def assert_close(got: Any, want: Any) -> None:
    """The same response, scores up to rounding."""
    scores: list[list[float]] = [[], []]

    def strip(value: Any, into: list[float]) -> Any:
        if isinstance(value, dict):
            return {key: strip(item, into) for key, item in value.items()}
        if isinstance(value, list):
            return [strip(item, into) for item in value]
        if isinstance(value, float):
            into.append(value)
            return None
        return value

    assert json.dumps(strip(got, scores[0])) == json.dumps(strip(want, scores[1]))
    np.testing.assert_allclose(*scores, atol=BATCH_TOLERANCE, rtol=0)
