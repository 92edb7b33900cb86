"""Every counting layer and encoder variant that gliner2 saves, against the library: whole results.

The pipeline, the network and the pooler are the ones that are served; vLLM comes in under tests/engine.
"""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest

from checkpoints import TEXTS
from gliner2_checkpoints import SCHEMA
from gliner2_harness import DETAILS, RECIPES, Gliner2Library, assert_same_result, library_answer
from harness import BATCH_TOLERANCE
from vllm_factory.io.gliner2_overlap import select_spans
from vllm_factory.io.gliner2_words import gliner2_splitter

pytestmark = pytest.mark.deberta_gliner2

TOKENLESS = set("\u200b\u200d\ufeff\x00")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "confidence": {"include_confidence": True},
    "spans": {"include_spans": True},
    "both": DETAILS,
    "raw": {"format_results": False},
    "raw-both": {"format_results": False, **DETAILS},
    "nested": {"threshold": 0.2, "overlap_policy": "nested", **DETAILS},
    "flat": {"threshold": 0.3, "overlap_policy": "flat", **DETAILS},
    "longest": {"threshold": 0.3, "overlap_policy": "Keep-Longest", "include_confidence": True},
    "allow": {"threshold": 0.3, "overlap_policy": "allow", "include_spans": True},
    "everything": {"threshold": 0.0, **DETAILS},
    "nothing": {"threshold": 1.0},
    "cut": {"max_len": 5, **DETAILS},
    "chunks": {"chunk_size": 7, "chunk_overlap": 3, "threshold": 0.3},
    "chunks-both": {"chunk_size": 5, "chunk_overlap": 1, "threshold": 0.3, **DETAILS},
    "chunks-nested": {"chunk_size": 6, "chunk_overlap": 2, "overlap_policy": "nested", "include_confidence": True},
}


def field(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, **options}


NAMES = [
    "[E]x",
    "a::str",
    'quo"te',
    "it's",
    "💛",
    "製品",
    "[L]",
    " ",
    "a [DESCRIPTION] b",
    "(",
    "|",
    "x" * 90,
    "[P] [C]",
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "all at once": SCHEMA,
    "names": {"entities": NAMES[:7] + NAMES[8:]},
    "marker as the last name": {"entities": ["place", "[E]"]},
    "200 names": {"entities": [f"type {index}" for index in range(200)]},
    "descriptions": {"entities": {"a": "b [E] c", "b": {"description": "", "dtype": "str"}, "c": {}}},
    "one of each": {"entities": {"a": {"dtype": "str", "threshold": 0.9}, "b": {"dtype": "str", "threshold": 0.0}}},
    "attributes": {
        "entities": {"person": {"threshold": 0.3}, "place": {"dtype": "str"}},
        "entity_attributes": {
            "mood": {"labels": ["glad", "sad"]},
            "kind": {
                "labels": ["old", "new", "place"],
                "multi_label": True,
                "threshold": 0.4,
                "qualify_labels": True,
            },
            "size": {"labels": ["big"], "applies_to": ["place"], "multi_label": True, "threshold": 0.0},
        },
    },
    "classes": {
        "classifications": [
            {"task": "t", "labels": ["a", "b", "c"], "prompt": "which one?"},
            {"task": "t 2", "labels": {"[L]": "a marker", "b": ""}, "multi_label": True, "top_k": 1},
            {"task": "many", "labels": NAMES[:6], "multi_label": True, "cls_threshold": 0.0, "top_k": 3},
            {"task": "none", "labels": ["x", "y"], "multi_label": True, "cls_threshold": 1.0},
            {"task": "soft", "labels": ["x", "y"], "multi_label": True, "class_act": "softmax"},
            {
                "task": "sigm",
                "labels": ["x", "y"],
                "class_act": "sigmoid",
                "examples": [["one", "x"], ["two", "z"]],
            },
        ]
    },
    "relations": {"relations": {"r": {}, "s": "described", "t": {"threshold": 0.05}, "u: v": {"description": "w"}}},
    "structures": {
        "structures": {
            "[x] y": {"fields": [field(name) for name in NAMES]},
            "choice": {
                "fields": [
                    field("a", choices=["(", "x", "X", ""], threshold=0.1),
                    field("b", choices=["x", "b c"], dtype="str", threshold=0.0),
                    field("c", choices=["choice:"], dtype="str"),
                    field("a", choices=["y"], threshold=0.2),
                ]
            },
            "modes": {"fields": [field("m", cardinality="required_one", exclusive=True)], "mode": "natural"},
            "head and tail": {"fields": [field("head"), field("tail", dtype="str"), field("other")]},
        }
    },
    "names that meet": {
        "entities": ["head", "tail", "x"],
        "structures": {
            "a": {"fields": [field("b.c", dtype="str"), field("head"), field("tail")]},
            "a.b": {"fields": [field("c", choices=["one", "two"], threshold=0.1)]},
            "r": {"fields": [field("tail"), field("z")]},
        },
        "relations": ["r", "entities", "t"],
        "classifications": [{"task": "t", "labels": ["x", "y"]}, {"task": "a", "labels": ["x", "y"]}],
    },
    "structure called entities": {"structures": {"entities": {"fields": [field("a")]}}},
    "class called entities": {"entities": ["a"], "classifications": [{"task": "entities", "labels": ["x", "y"]}]},
    "class called relation_extraction": {
        "relations": ["a"],
        "classifications": [{"task": "relation_extraction", "labels": ["x", "y"]}],
    },
    "fields that look like spans": {
        "structures": {
            "s": {"fields": [field("text", dtype="str"), field("confidence"), field("label", dtype="str")]}
        }
    },
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_library_alone_and_in_a_batch(name: str, option: str, gliner2_library: Gliner2Library) -> None:
    reference, engine = gliner2_library.reference(name), gliner2_library.local(name)
    # A chunk that ends in a word without tokens is beyond the library: it reads behind the prompt, or fails.
    texts = [text for text in TEXTS if "chunk_size" not in OPTIONS[option] or not TOKENLESS & set(text)]
    requests = [{"text": text, "schema": SCHEMA, **OPTIONS[option]} for text in texts]
    want = [library_answer(reference, data) for data in requests]
    for data, together, expected in zip(requests, engine.answer_together(requests), want, strict=True):
        scored = partial(library_answer, reference, data | DETAILS)
        assert_same_result(together, expected, scored=scored)
        assert_same_result(engine.answer(**data), expected, scored=scored)


@pytest.mark.parametrize("name", ["lstm", "lstm-v2", "lstm-moe"])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_equals_the_library_for_every_schema(schema: str, name: str, gliner2_library: Gliner2Library) -> None:
    reference, engine = gliner2_library.reference(name), gliner2_library.local(name)
    # 200 names are slow in the library.
    options = ("both",) if schema == "200 names" else ("plain", "both", "raw", "chunks")
    for text, option in itertools.product((TEXTS[0], TEXTS[2], ""), options):
        data = {"text": text, "schema": SCHEMAS[schema], **OPTIONS[option]}
        scored = partial(library_answer, reference, data | DETAILS)
        assert_same_result(engine.answer(**data), library_answer(reference, data), scored=scored)


@pytest.mark.parametrize("name", RECIPES)
def test_batch_invariance_of_mixed_requests(name: str, gliner2_library: Gliner2Library) -> None:
    """Other lengths, schemas, thresholds and options beside a request change nothing for it."""
    engine = gliner2_library.local(name)
    schemas = [SCHEMA, *(SCHEMAS[key] for key in ("attributes", "classes", "relations", "descriptions"))]
    if name not in ("mean", "max", "absolute"):
        schemas += [SCHEMAS["structures"], SCHEMAS["200 names"]]
    else:
        schemas = [SCHEMA, SCHEMAS["attributes"], SCHEMAS["relations"], SCHEMAS["one of each"]]
    options = list(OPTIONS.values())
    requests = [
        {"text": text, "schema": schemas[i % len(schemas)], **options[i % len(options)]}
        for i, text in enumerate([*TEXTS, TEXTS[0] * 2, "", "a", TEXTS[3]] * 2)
    ]
    alone = [engine.answer(**data) for data in requests]
    for order in (requests, requests[::-1], requests[::3]):
        for data, got in zip(order, engine.answer_together(order), strict=True):
            scored = partial(engine.answer, **data | DETAILS)
            assert_same_result(got, alone[requests.index(data)], tolerance=BATCH_TOLERANCE, scored=scored)


def test_budgets_change_nothing(gliner2_library: Gliner2Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large for one computation is computed in parts."""
    engine = gliner2_library.local("lstm-v2")
    requests = [{"text": text, "schema": SCHEMA, **DETAILS} for text in TEXTS]
    requests += [{"text": TEXTS[0], "schema": SCHEMAS[key], **DETAILS} for key in ("200 names", "structures")]
    want = engine.answer_together(requests)
    monkeypatch.setattr("vllm_factory.poolers.gliner2.ROW_BUDGET", 50)
    monkeypatch.setattr("vllm_factory.poolers.gliner2_counting.FIELD_BUDGET", 3)
    for got, expected in zip(engine.answer_together(requests), want, strict=True):
        assert_same_result(got, expected, tolerance=BATCH_TOLERANCE)


def test_labels_are_entities(gliner2_library: Gliner2Library) -> None:
    reference, engine = gliner2_library.reference("lstm"), gliner2_library.local("lstm")
    for labels in (["person", "place", "person"], {"person": "a human", "place": ""}):
        data = {"text": TEXTS[0], "labels": labels, "threshold": 0.3, **DETAILS}
        assert_same_result(engine.answer(**data), library_answer(reference, data))


@pytest.mark.parametrize("schema", [{"entities": ["[E]", "a", "b"]}, {"relations": ["[R]"]}])
def test_markers_as_names_are_names_where_the_library_fails(
    schema: dict[str, Any], gliner2_library: Gliner2Library
) -> None:
    data = {"text": TEXTS[0], "schema": schema, "threshold": 0.0}
    with pytest.raises(IndexError):
        library_answer(gliner2_library.reference("lstm"), data)
    answer = gliner2_library.local("lstm").answer(**data)
    found = answer["entities"] if "entities" in schema else answer["relation_extraction"]
    assert list(found) == next(iter(schema.values()))
    assert all(found.values())


def test_lists_of_texts_and_usage(gliner2_library: Gliner2Library) -> None:
    engine = gliner2_library.local("lstm")
    several = engine.answer(text=TEXTS[:3], labels=["person"], threshold=0.2)
    assert several == [engine.answer(text=text, labels=["person"], threshold=0.2) for text in TEXTS[:3]]
    answer = engine.answer(text=TEXTS[0], labels=["person"], threshold=0.2, include_usage=True)
    assert answer["result"] == several[0]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 10
    assert answer["texts"] == {"chunks": 1, "truncated": False}


def test_words_are_the_library_s() -> None:
    from gliner2.processing.word_splitter import WhitespaceTokenSplitter

    library, ours = WhitespaceTokenSplitter(), gliner2_splitter()
    draw = random.Random(0)
    pieces = [
        *TEXTS,
        "http://a.b/c?d=e",
        "www.x.y",
        "@you",
        "me@x.org.",
        "ſK@a.bc",
        "a--b_c-d",
        "क्षि",
        "\u200d\u200c-",
    ]
    pieces += [chr(draw.choice([draw.randrange(0x250), draw.randrange(0xD800)])) for _ in range(3000)]
    for _ in range(500):
        text = "".join(draw.choices(pieces, k=12))
        assert ours(text) == list(library(text))


@pytest.mark.parametrize("policy", [None, "allow", "nested", "disallow", "longest"])
def test_overlaps_are_resolved_as_in_the_library(policy: Any) -> None:
    import numpy as np
    from gliner2.inference.candidate_decoder import finalize_spans

    draw = np.random.default_rng(0)
    for _ in range(300):
        start = draw.integers(0, 12, 15)
        end = start + draw.integers(1, 6, 15)
        # Few distinct scores, so that ties happen; spans distinct, as those of a field are.
        score = draw.choice([0.25, 0.5, 0.75], 15)
        _, first = np.unique(np.stack([start, end]), axis=1, return_index=True)
        start, end, score = start[first], end[first], score[first]
        spans = [(str(i), s, a, b) for i, (s, a, b) in enumerate(zip(score, start, end, strict=True))]
        want = [int(span[0]) for span in finalize_spans(spans, overlap_policy=policy)]
        assert select_spans(start, end, score, policy) == want


SPANS = [{"text": "a", "confidence": 0.500001}, {"text": "b", "confidence": 0.5}, {"text": "c", "confidence": 0.4}]


def test_the_comparison_forgives_ties_and_nothing_else() -> None:
    plain = {"x": ["a", "b", "c"], "y": [{"z": ["a"]}]}
    scored = {"x": SPANS, "y": [{"z": SPANS[:1]}]}
    swapped = {"x": SPANS[1::-1] + SPANS[2:], "y": scored["y"]}
    assert_same_result({**plain, "x": ["b", "a", "c"]}, plain, scored=lambda: scored)
    assert_same_result(swapped, scored)
    for wrong in (
        {**plain, "x": ["a", "c", "b"]},
        {**plain, "x": ["a", "b"]},
        {**plain, "x": ["a", "b", "b"]},
        {**plain, "y": [{"z": ["b"]}]},
        {"y": plain["y"], "x": plain["x"]},
        {**plain, "y": [{"z": "a"}]},
    ):
        with pytest.raises(AssertionError):
            assert_same_result(wrong, plain, scored=lambda: scored)
