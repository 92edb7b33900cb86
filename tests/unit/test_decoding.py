"""The overlap rules against gliner's own greedy search, over random candidates full of ties."""

from __future__ import annotations

import numpy as np
import pytest
from gliner.decoding.decoder import Span, SpanDecoder
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_factory.io.decoding import resolve_overlaps

CANDIDATES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 2), st.sampled_from([0.2, 0.5, 0.5001, 0.9])),
    max_size=40,
    unique_by=lambda c: c[:3],
)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("multi_label", [True, False])
@settings(max_examples=300)
@given(candidates=CANDIDATES)
def test_equals_the_library(candidates: list[tuple[int, int, int, float]], flat: bool, multi_label: bool) -> None:
    spans = [Span(s, s + width, str(label), score) for s, width, label, score in candidates]
    want = SpanDecoder(None).greedy_search(spans, flat_ner=flat, multi_label=multi_label)
    start, end = (np.array([getattr(span, key) for span in spans], np.int32) for key in ("start", "end"))
    score = np.array([span.score for span in spans], np.float32)
    kept = resolve_overlaps(start, end, score, flat=flat, multi_label=multi_label)
    assert [spans[i] for i in kept] == want


def test_a_quarter_million_candidates_take_no_quadratic_time() -> None:
    rng = np.random.default_rng(0)
    start = rng.integers(0, 400, 250_000).astype(np.int32)
    end = start + rng.integers(0, 12, start.size).astype(np.int32)
    score = rng.random(start.size, np.float32)
    kept = resolve_overlaps(start, end, score, flat=False, multi_label=False)
    assert 400 <= len(kept) < start.size
