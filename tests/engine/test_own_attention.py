"""Our attention inside vLLM's retrieval models: in float32 on GPUs, where vLLM's own rounds; here by request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_engine import engine

from retrieval_harness import Golden, ask, assert_same_vectors, each, request, vectors

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="vLLM is not installed: make install")

#: Sliding windows, convolutions, several layers of attention, images; some look back only, others both ways.
GOLDENS = each(
    Golden("embeddinggemma", "joined"),
    Golden("moderncolbert", "attended"),
    Golden("lfm2_colbert", "attended"),
    Golden("lfm2_colbert", "hidden"),
    Golden("colqwen3", "default"),
    Golden("nemotron_colembed", "short"),
    Golden("collfm2", "wide"),
)


@pytest.fixture(scope="module", params=GOLDENS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Golden, Any]]:
    """A golden checkpoint and an engine that serves it by our attention alone."""
    from vllm_factory.compat import own_attention

    golden: Golden = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_attention, "inexact_on_this_device", lambda _: True)
        with engine(golden.path, **golden.engine_options()) as llm:
            yield golden, llm


def test_vectors_equal_the_library_s(served: tuple[Golden, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    golden, llm = served
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    for layer in _attention_of_vllm(runner.model):
        monkeypatch.setattr(layer, "forward", _never)
    for case in golden.cases(pool_factor=1):
        assert_same_vectors(vectors(ask(llm, **request(case)))[0], golden.arrays()[case["key"]], case["key"])


def test_neighbours_change_nothing(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    cases = [case for case in golden.cases(pool_factor=1) if {"text", "image"} & set(case) == {"text"}]
    options = next(_options(case) for case in cases if not case.get("is_query"))
    cases = [case for case in cases if _options(case) == options]
    assert len(cases) > 1
    together = vectors(ask(llm, text=[request(case)["text"] for case in cases * 8], **options))
    for case, got in zip(cases * 8, together, strict=True):
        np.testing.assert_allclose(got, golden.arrays()[case["key"]], atol=1e-4, rtol=0)


def _options(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in request(case).items() if key not in {"text", "image"}}


def _attention_of_vllm(model: Any) -> list[Any]:
    from vllm_factory.compat.own_attention import HiddenKeysAttention

    found = [module.attention for module in model.modules() if isinstance(module, HiddenKeysAttention)]
    assert found
    return found


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("vLLM's attention ran")
