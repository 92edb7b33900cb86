"""What the GLiNER heads refuse, and what they say instead of serving something wrong."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from checkpoints import LABELS, TEXTS
from conftest import Library
from vllm_factory.errors import TransportError
from vllm_factory.poolers import gliner
from vllm_factory.pooling.protocol import FactoryPooler, Status

pytestmark = pytest.mark.deberta_gliner

THRESHOLD = np.array([0.5], np.float32)
TOKENS = 10


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [THRESHOLD, ints(0)],
        [ints(0), ints(0), ints(0)],
        [THRESHOLD, ints(), ints(0)],
        [THRESHOLD, ints(-1), ints(0)],
        [THRESHOLD, ints(TOKENS), ints(0)],
        [THRESHOLD, ints(0), ints(TOKENS)],
        [THRESHOLD, ints(0), ints(-2)],
        [np.array([np.nan], np.float32), ints(0), ints(0)],
        [np.ones(2, np.float32), ints(0), ints(0)],
    ],
    ids=str,
)
def test_arrays_that_do_not_fit_the_prompt_are_refused(arrays: list[np.ndarray], library: Library) -> None:
    head = library.local("span-v3").network.head
    assert isinstance(head, FactoryPooler)
    with pytest.raises(TransportError):
        head.parse(arrays, TOKENS)


@pytest.mark.parametrize("words", [ints(), ints(0, TOKENS + 1), ints(3, 2), ints(-1, 2)], ids=str)
def test_word_bounds_that_do_not_fit_are_refused(words: np.ndarray, library: Library) -> None:
    with pytest.raises(TransportError):
        library.local("span-mean").network.head.parse([THRESHOLD, ints(0), words], TOKENS)


@pytest.mark.parametrize("name", ["span-v3", "token-v3", "token-spans"])
def test_scores_that_are_not_finite_are_never_served(name: str, library: Library) -> None:
    engine = copy.copy(library.local(name))
    engine.network = copy.deepcopy(engine.network)
    with torch.no_grad():
        next(engine.network.parameters()).fill_(float("nan"))
    encoded = engine.pipeline.encode(engine.pipeline.parse({"text": TEXTS[0], "labels": LABELS}))
    assert [result.status for result in engine.run(encoded.prompts)] == [Status.NOT_FINITE]


@pytest.mark.parametrize("name", ["span-v3", "token-v3"])
def test_too_many_candidates_cost_only_their_own_request(
    name: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = library.local(name)
    monkeypatch.setattr(gliner, "MAX_CANDIDATES", 20)
    prompts = []
    for threshold in (0.0, 0.99):
        request = engine.pipeline.parse({"text": TEXTS[0], "labels": LABELS, "threshold": threshold})
        prompts += engine.pipeline.encode(request).prompts
    assert [result.status for result in engine.run(prompts)] == [Status.TOO_MANY, Status.OK]


@pytest.mark.parametrize("name", ["span-v3", "token-v3", "token-spans"])
def test_small_groups_give_the_same_answers(name: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = library.local(name)
    requests = [{"text": text, "labels": LABELS, "threshold": 0.3} for text in TEXTS]
    want = engine.answer_together(requests)
    monkeypatch.setattr(gliner, "WORD_BUDGET", 40)
    monkeypatch.setattr(gliner, "ROW_BUDGET", 30)
    for got, expected in zip(engine.answer_together(requests), want, strict=True):
        assert [(e["start"], e["end"], e["label"]) for e in got] == [
            (e["start"], e["end"], e["label"]) for e in expected
        ]
