"""Windows of whole words: what they cover, and how their candidates are merged."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import LABELS, TEXTS
from conftest import Library
from harness import LocalEngine, assert_same_entities
from vllm_factory.errors import RequestError
from vllm_factory.io.gliner import merge_windows
from vllm_factory.io.windows import Window, windows

pytestmark = pytest.mark.deberta_gliner

LONG = " ".join(TEXTS * 3)


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    max_words=st.integers(1, 12),
    max_tokens=st.integers(1, 40),
    overlap=st.integers(0, 20),
)
def test_windows_cover_every_word_within_bounds(
    counts: list[int], max_words: int, max_tokens: int, overlap: int
) -> None:
    placed = windows(counts, max_words=max_words, max_tokens=max_tokens, overlap=overlap)
    assert placed[0].start == 0
    assert placed[-1].end == len(counts)
    for window in placed:
        assert 1 <= window.end - window.start <= max_words
        assert window.end - window.start == 1 or sum(counts[window.start : window.end]) <= max_tokens
    for before, after in pairwise(placed):
        assert before.start < after.start <= before.end


def test_a_span_up_to_the_overlap_is_whole_in_some_window() -> None:
    placed = windows([1] * 100, max_words=20, max_tokens=100, overlap=6)
    for start in range(95):
        assert any(w.start <= start and start + 6 <= w.end for w in placed)


def test_a_short_text_is_one_window() -> None:
    assert windows([2, 3], max_words=5, max_tokens=5, overlap=2) == [Window(0, 2)]


def test_merging_counts_a_candidate_once_with_its_higher_score() -> None:
    def candidates(*rows: tuple[int, int, int, float]) -> list[np.ndarray]:
        columns = list(zip(*rows, strict=True))
        return [np.array(c, np.float32 if i == 3 else np.int32) for i, c in enumerate(columns)]

    first = candidates((0, 1, 0, 0.6), (8, 9, 1, 0.7))
    second = candidates((0, 1, 1, 0.9), (3, 3, 0, 0.5))
    start, end, label, score = merge_windows([first, second], [Window(0, 10), Window(8, 14)], token_level=False)
    merged = list(zip(start.tolist(), end.tolist(), label.tolist(), score.round(3).tolist(), strict=True))
    assert merged == [(0, 1, 0, pytest.approx(0.6)), (8, 9, 1, pytest.approx(0.9)), (11, 11, 0, 0.5)]


@pytest.mark.parametrize("name", ["span-v3", "token-v3"])
def test_offsets_are_global_and_text_is_the_original(name: str, library: Library) -> None:
    entities = library.local(name).answer(text=LONG, labels=LABELS, threshold=0.4)
    assert max(entity["end"] for entity in entities) > len(LONG) * 2 / 3
    assert all(entity["text"] == LONG[entity["start"] : entity["end"]] for entity in entities)


def test_a_long_text_s_entities_are_its_windows_candidates(library: Library) -> None:
    """Each with the higher score of the windows that saw it; and a window is a text like any other."""
    engine = library.local("span-v3")
    data = {"text": LONG, "labels": LABELS, "threshold": 0.6}
    encoded = engine.pipeline.encode(engine.pipeline.parse(data))
    state = encoded.state.texts[0]
    assert len(encoded.prompts) == len(state.windows) > 2
    best: dict[tuple[int, int, str], float] = {}
    for window, result in zip(state.windows, engine.run(encoded.prompts), strict=True):
        for start, end, label, score in zip(*result.arrays, strict=True):
            key = (state.words[window.start + start][1], state.words[window.start + end][2], LABELS[label])
            best[key] = max(best.get(key, 0.0), float(score))
    whole = engine.answer(**data)
    assert whole
    for found in whole:
        assert found["score"] == pytest.approx(best[found["start"], found["end"], found["label"]], abs=1e-5)


def test_tokens_bound_windows_too(library: Library) -> None:
    small = LocalEngine(library.prepared("span-v3"), max_tokens=60)
    reference = library.reference("span-v3")
    usage = small.answer(text=TEXTS[1], labels=LABELS[:2], threshold=0.3, include_usage=True)
    assert usage["texts"]["windows"] > 1
    assert not usage["texts"]["truncated"]
    short = "Angela Merkel met Tim Cook"
    want = reference.predict_entities(short, LABELS[:2], threshold=0.3)
    assert_same_entities(small.answer(text=short, labels=LABELS[:2], threshold=0.3), want)


def test_a_word_longer_than_a_window_is_cut_and_says_so(library: Library) -> None:
    small = LocalEngine(library.prepared("span-v3"), max_tokens=64)
    answer = small.answer(text="x" * 500 + " Angela", labels=["person"], include_usage=True)
    assert answer["texts"]["truncated"]


def test_error_mode_names_the_text_and_the_numbers(library: Library) -> None:
    with pytest.raises(RequestError, match=r"text\[1\]: \d+ words, \d+ tokens; the model reads 40 words"):
        library.local("span-v3").answer(text=["a", LONG], labels=LABELS, truncation="error")


def test_too_many_label_tokens_are_refused(library: Library) -> None:
    small = LocalEngine(library.prepared("span-v3"), max_tokens=32)
    with pytest.raises(RequestError, match=r"labels: 7 labels are .* tokens"):
        small.answer(text="a", labels=LABELS)


@pytest.mark.parametrize("label", ["<<ENT>>", "a <<ENT>> b", "x<<SEP>>"])
def test_labels_with_marker_text_are_refused(label: str, library: Library) -> None:
    with pytest.raises(RequestError, match=r"labels\[1\]: .* contains a marker"):
        library.local("span-v3").answer(text="a", labels=["place", label])
