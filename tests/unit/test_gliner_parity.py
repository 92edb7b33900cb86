"""Every head and encoder variant that the library saves, against the library: entities and scores.

The pipeline, the network and the pooler are the ones that are served; vLLM comes in under tests/engine.
"""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import LABELS, TEXTS
from conftest import LOCAL_RECIPES, Library, each, named
from harness import BATCH_TOLERANCE, assert_same_entities

MODES = [
    {"threshold": 0.5},
    {"threshold": 0.2, "flat_ner": False},
    {"threshold": 0.3, "multi_label": True},
    {"threshold": 0.35, "flat_ner": False, "multi_label": True},
]
CASES = {f"{name}-{i}": named(name, mode) for name in LOCAL_RECIPES for i, mode in enumerate(MODES)}


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
def test_equals_the_library_alone_and_in_a_batch(name: str, options: dict[str, Any], library: Library) -> None:
    reference, engine = library.reference(name), library.local(name)
    want = [reference.predict_entities(text, LABELS, **options) for text in TEXTS]
    assert sum(map(len, want)) > 10, "a comparison of nothing proves nothing"
    alone = [engine.answer(text=text, labels=LABELS, **options) for text in TEXTS]
    together = engine.answer_together([{"text": text, "labels": LABELS, **options} for text in TEXTS])
    for got_alone, got_together, expected in zip(alone, together, want, strict=True):
        assert_same_entities(got_alone, expected)
        assert_same_entities(got_together, expected)


MIXED = [
    *("span-v3", "token-v3", "span-v2-conv", "span-mean", "mode-markerV1", "mt5-span", "mt5-token", "t5-relu"),
    *("linker-span", "linker-token", "linker-projected", "linker-spans"),
]


@pytest.mark.parametrize("name", each(MIXED))
def test_batch_invariance_of_mixed_requests(name: str, library: Library) -> None:
    """Other lengths, label sets, thresholds and modes beside a request change nothing for it."""
    engine = library.local(name)
    requests = [
        {"text": text, "labels": LABELS[: 1 + i % len(LABELS)], **MODES[i % len(MODES)]}
        for i, text in enumerate([*TEXTS, " ".join(TEXTS[:4]), "", TEXTS[:3]])
    ]
    alone = [engine.answer(**data) for data in requests]
    for order in (requests, requests[::-1], requests[::2], requests * 3):
        for data, got in zip(order, engine.answer_together(order), strict=True):
            want = alone[requests.index(data)]
            lists = [(got, want)] if isinstance(data["text"], str) else list(zip(got, want, strict=True))
            for one_got, one_want in lists:
                assert_same_entities(one_got, one_want, tolerance=BATCH_TOLERANCE)


@pytest.mark.parametrize("name", each(["span-v3", "mt5-span", "linker-span"]))
def test_descriptions_replace_labels_in_the_prompt(name: str, library: Library) -> None:
    labels = {"PER": "a human being, by name", "LOC": "place", "X": "date of birth"}
    want = library.reference(name).predict_entities(TEXTS[0], labels, threshold=0.2)
    assert want
    assert_same_entities(library.local(name).answer(text=TEXTS[0], labels=labels, threshold=0.2), want)


@pytest.mark.parametrize("labels", [["person", "place", "person"], ["", "place"], ["\u200b", "place"], [" "]])
@pytest.mark.parametrize(
    "name", each(["span-v3", "span-v2-conv", "token-v3", "mt5-span", "mt5-token", "linker-span", "linker-token"])
)
def test_odd_labels_are_what_they_are_in_the_library(name: str, labels: list[str], library: Library) -> None:
    want = library.reference(name).predict_entities(TEXTS[0], labels, threshold=0.2)
    assert_same_entities(library.local(name).answer(text=TEXTS[0], labels=labels, threshold=0.2), want)


@pytest.mark.deberta_gliner
@pytest.mark.parametrize("text", ["", " ", "\n\t ", "\u3000"])
def test_texts_without_words_have_no_entities(text: str, library: Library) -> None:
    assert library.reference("span-v3").predict_entities(text, LABELS) == []
    assert library.local("span-v3").answer(text=text, labels=LABELS) == []
    assert library.local("span-v3").answer(text=[text, TEXTS[0]], labels=LABELS, threshold=0.2)[0] == []


@pytest.mark.parametrize("name", each(["span-v3", "token-v3", "mt5-span", "linker-span", "linker-token"]))
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_extreme_thresholds_are_values(name: str, threshold: float, library: Library) -> None:
    options: dict[str, Any] = {"threshold": threshold, "flat_ner": False}
    want = library.reference(name).predict_entities(TEXTS[6], LABELS, **options)
    assert_same_entities(library.local(name).answer(text=TEXTS[6], labels=LABELS, **options), want)


@pytest.mark.parametrize(
    "name", each(["span-v3", "token-v3", "span-max", "mt5-span", "mt5-pickled", "linker-span", "linker-token"])
)
def test_truncate_reads_what_the_library_reads(name: str, library: Library) -> None:
    text = " ".join(TEXTS * 2)
    with pytest.warns(UserWarning, match="truncated"):
        want = library.reference(name).predict_entities(text, LABELS, threshold=0.2)
    got = library.local(name).answer(text=text, labels=LABELS, threshold=0.2, truncation="truncate")
    assert_same_entities(got, want)
