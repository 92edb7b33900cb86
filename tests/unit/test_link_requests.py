"""Linking requests: what is refused, with which message, and what the model reads of the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from checkpoints import LABELS, TEXTS
from conftest import Library
from harness import LocalEngine, assert_same_entities, prepared_pipeline
from vllm_factory.errors import RequestError, TransportError
from vllm_factory.io.limits import Limits
from vllm_factory.io.linking import LinkRequest, RerankRequest, parse_link_request
from vllm_factory.poolers.selection import Selection

LIMITS = Limits(max_chars=100, max_texts=3, max_labels=5, max_candidates=4, max_mentions=3)
GOOD: dict[str, Any] = {"text": "Angela met Tim.", "candidate_labels": ["Angela Merkel"]}
SPAN = {"start": 0, "end": 6}

REFUSED: dict[str, tuple[Any, str]] = {
    "a list": ([], "data: []; expected an object with text, and labels or candidate_labels"),
    "neither": ({"text": "a"}, "labels: neither labels nor candidate_labels"),
    "labels empty": ({"text": "a", "labels": []}, "labels: expected at least one (got [])"),
    "labels a number": ({"text": "a", "labels": 3}, "labels: expected a list of strings, or an object"),
    "candidates empty": ({**GOOD, "candidate_labels": []}, "candidate_labels: expected at least one (got [])"),
    "candidates a string": ({**GOOD, "candidate_labels": "a"}, "candidate_labels: expected a list of strings or"),
    "candidate without label": ({**GOOD, "candidate_labels": [{"description": "x"}]}, "candidate_labels[0].label"),
    "candidate's unknown field": (
        {**GOOD, "candidate_labels": ["a", {"label": "b", "name": "x"}]},
        "candidate_labels[1].name: unknown field",
    ),
    "candidate's number": ({**GOOD, "candidate_labels": [{"label": 3}]}, "candidate_labels[0].label: "),
    "too many candidates": ({**GOOD, "candidate_labels": list("abcde")}, "5 candidates; one request takes 4"),
    "surrogate": ({**GOOD, "candidate_labels": ["a", "\ud800"]}, "candidate_labels[1].label: not valid Unicode"),
    "template without field": ({**GOOD, "template": "x"}, "template: a template holds at least one of {label}"),
    "template that reaches in": ({**GOOD, "template": "{label.__class__}"}, "template: a template holds"),
    "template with a width": ({**GOOD, "template": "{label:1000000000}"}, "template: a template holds"),
    "template unclosed": ({**GOOD, "template": "{label"}, "template: not a template"),
    "top_k": ({**GOOD, "top_k": 0}, "top_k: Input should be greater than or equal to 1 (got 0)"),
    "mention reversed": ({**GOOD, "mentions": [SPAN, {"start": 5, "end": 2}]}, "mentions[1]: characters 5 to 2"),
    "mention outside": ({**GOOD, "mentions": [{"start": 0, "end": 99}]}, "are no span of a text of 15 characters"),
    "mention negative": ({**GOOD, "mentions": [{"start": -1, "end": 9}]}, "mentions[0].start"),
    "mentions nested": ({**GOOD, "mentions": [[SPAN]]}, "mentions: a list of lists for one text"),
    "mentions flat": ({**GOOD, "text": ["a"], "mentions": [SPAN]}, "expected one list of mentions a text"),
    "mentions missing": ({**GOOD, "text": ["a", "b"], "mentions": [[]]}, "mentions: 1 entries for 2 texts"),
    "too many mentions": ({**GOOD, "mentions": [SPAN] * 4}, "mentions: 4 mentions; one request takes 3"),
    "labels and mentions": (
        {**GOOD, "labels": ["a"], "mentions": [SPAN]},
        "mentions: labels would find the mentions that are given",
    ),
    "unknown field": ({**GOOD, "max_labels": 3}, "max_labels: unknown field"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(data: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_link_request(LinkRequest, data, LIMITS)
    assert message in str(caught.value)


def test_candidates_that_read_alike_count_once() -> None:
    given = ["Apple", "apple", {"label": "APPLE", "description": "x"}, {"label": "Apple", "entity_id": "Q2"}]
    request = parse_link_request(LinkRequest, {**GOOD, "candidate_labels": given}, LIMITS)
    assert list(request.candidates) == ["Apple", "APPLE: x"]
    assert request.candidates["Apple"].entity_id is None


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (None, ["a: thing", "b"]),
        ("{label}", ["a", "b"]),
        ("{label}: {description}", ["a: thing", "b: "]),
        ("{{{label}}} ({entity_type}, {entity_id})", ["{a} (kind, Q1)", "{b} (, )"]),
    ],
)
def test_templates(template: str | None, written: list[str]) -> None:
    candidates = [{"label": "a", "description": "thing", "entity_id": "Q1", "entity_type": "kind"}, "b"]
    data = {**GOOD, "candidate_labels": candidates, "template": template}
    assert list(parse_link_request(LinkRequest, data, LIMITS).candidates) == written


def test_a_mapping_is_names_and_descriptions() -> None:
    data = {**GOOD, "candidate_labels": {"a": "thing", "b": ""}}
    assert list(parse_link_request(RerankRequest, data, LIMITS).candidates) == ["a: thing", "b"]


def test_an_earlier_answer_s_entities_are_mentions() -> None:
    found = {"text": "Angela", "label": "person", "score": 0.9, **SPAN}
    request = parse_link_request(LinkRequest, {**GOOD, "mentions": [found]}, LIMITS)
    assert [(m.start, m.end) for m in request.mentions_of(0) or ()] == [(0, 6)]


@pytest.mark.deberta_gliner_linker
def test_a_label_of_too_many_tokens_is_refused_by_name(library: Library) -> None:
    pipeline = prepared_pipeline(library.prepared("linker-span"))
    data = {"text": "a", "labels": ["x"], "candidate_labels": ["b", "word " * 600]}
    with pytest.raises(RequestError, match=r"candidate_labels\[1\]: .* a label may be 1 to 512"):
        pipeline.encode(pipeline.parse(data))


@pytest.mark.deberta_gliner_linker
def test_a_knowledge_base_for_every_window_of_a_library_is_refused(library: Library) -> None:
    pipeline = prepared_pipeline(library.prepared("linker-span"))
    data = {"text": ["a"] * 1024, "candidate_labels": [f"thing number {i}" for i in range(5000)]}
    with pytest.raises(RequestError, match=r"1024 prompts .* Send fewer texts or fewer labels"):
        pipeline.encode(pipeline.parse(data))


@pytest.mark.deberta_gliner_linker
def test_five_thousand_candidates(library: Library) -> None:
    """Every candidate of a large knowledge base competes, and all at once."""
    candidates = [f"{LABELS[i % len(LABELS)]} {TEXTS[i % 4][: 3 + i % 23]} {i}" for i in range(5000)]
    engine = library.local("linker-span")
    want = library.reference("linker-span").predict_entities(TEXTS[0], candidates, threshold=0.5)
    got = engine.answer(text=TEXTS[0], candidate_labels=candidates, threshold=0.5)
    assert want
    assert_same_entities([{**e, "label": e["label"]} for e in got], want)
    assert all(len(e["candidates"]) == 5 and e["candidates"][0]["label"] == e["label"] for e in got)


@pytest.mark.deberta_gliner_linker
def test_fused_layers_of_labels_are_those_of_each_label_alone(library: Library) -> None:
    """In the library they depend on the padding, and so on the longest label of the call."""
    reference, engine = library.reference("linker-fused"), library.local("linker-fused")
    found = 0
    for label in LABELS:
        want = reference.predict_entities(TEXTS[0], [label], threshold=0.3)
        assert_same_entities(engine.answer(text=TEXTS[0], labels=[label], threshold=0.3), want)
        found += len(want)
    assert found > 3
    together = engine.answer(text=TEXTS[0], labels=LABELS, threshold=0.3, multi_label=True, flat_ner=False)
    assert together


THRESHOLD, WORDS = np.array([0.5], np.float32), np.array([0, 1], np.int32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


HOSTILE = {
    "missing": [THRESHOLD, ints(0, 1)],
    "kinds": [ints(0), ints(0, 1), ints(0), WORDS],
    "no labels": [THRESHOLD, ints(0), ints(), WORDS],
    "no bounds": [THRESHOLD, ints(), ints(), WORDS],
    "bounds beyond": [THRESHOLD, ints(0, 3), ints(1, 2), WORDS],
    "bounds begin late": [THRESHOLD, ints(1, 2), ints(1, 2), WORDS],
    "empty label": [THRESHOLD, ints(0, 0, 2), ints(1, 2), WORDS],
    "long label": [THRESHOLD, ints(0, 513), np.ones(513, np.int32), WORDS],
    "unknown token": [THRESHOLD, ints(0, 1), ints(500), WORDS],
    "negative token": [THRESHOLD, ints(0, 1), ints(-1), WORDS],
    "word outside": [THRESHOLD, ints(0, 1), ints(1), ints(10)],
    "selection short": [THRESHOLD, ints(0, 1), ints(1), WORDS, ints(0, 0)],
    "selection odd": [THRESHOLD, ints(0, 1), ints(1), WORDS, ints(0, 0, 0, 1, 0)],
    "selection first": [THRESHOLD, ints(0, 1), ints(1), WORDS, ints(0, 0, 2, 0)],
    "selection top": [THRESHOLD, ints(0, 1), ints(1), WORDS, ints(0, 1000, 0, 0)],
    "mention outside": [THRESHOLD, ints(0, 1), ints(1), WORDS, ints(0, 1, 0, 1, 0, 2)],
    "mention reversed": [THRESHOLD, ints(0, 1), ints(1), WORDS, ints(0, 1, 0, 1, 1, 0)],
    "mentions unasked": [THRESHOLD, ints(0, 1), ints(1), WORDS, ints(0, 1, 0, 0, 0, 1)],
}


@pytest.mark.deberta_gliner_linker
@pytest.mark.parametrize("arrays", HOSTILE.values(), ids=HOSTILE)
def test_arrays_that_do_not_fit_are_refused(arrays: list[np.ndarray], library: Library) -> None:
    with pytest.raises(TransportError):
        library.local("linker-span").network.head.parse(arrays, 10)


def test_a_selection_survives_its_packing() -> None:
    for selection in (Selection(), Selection(True, 5, 2, np.array([[0, 1], [2, 2]], np.int32)), Selection(top=1)):
        got = Selection.unpack(selection.pack(), num_words=3, num_labels=4)
        assert (got.best_only, got.top, got.first) == (selection.best_only, selection.top, selection.first)
        assert (got.mentions is None) == (selection.mentions is None)
        if got.mentions is not None:
            np.testing.assert_array_equal(got.mentions, selection.mentions)


@pytest.mark.deberta_gliner_linker
@pytest.mark.parametrize("name", ["linker-span", "linker-token"])
def test_rows_in_small_pieces_give_the_same(name: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_factory.poolers import gliner, gliner_bi

    engine: LocalEngine = library.local(name)
    requests = [
        {"text": text, "candidate_labels": LABELS, "threshold": 0.3, "multi_label": bool(i % 2)}
        for i, text in enumerate(TEXTS)
    ]
    want = engine.answer_together(requests)
    monkeypatch.setattr(gliner, "LOGIT_BUDGET", 500)
    monkeypatch.setattr(gliner, "ROW_BUDGET", 100)
    monkeypatch.setattr(gliner, "WORD_BUDGET", 60)
    monkeypatch.setattr(gliner_bi, "TOKEN_BUDGET", 7)
    for got, expected in zip(engine.answer_together(requests), want, strict=True):
        assert_same_entities(got, expected)
        for one, other in zip(got, expected, strict=True):
            assert [c["label"] for c in one["candidates"]] == [c["label"] for c in other["candidates"]]
