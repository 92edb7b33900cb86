"""Retrieval models in vLLM on a GPU against the library's stored results. Run by ``scripts/gpu_proof.sh``.

In float32, without compilation; and as they are served unless told otherwise: bfloat16, compiled, with CUDA graphs.
The stored results come from a CPU, so besides the model this compares two kinds of arithmetic.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from retrieval_harness import Golden, ask, document, each, request, vectors

pytestmark = pytest.mark.gpu

EXACT = each(
    *(Golden("embeddinggemma", name) for name in ("mean", "joined")),
    *(Golden("moderncolbert", name) for name in ("hidden", "attended")),
    *(Golden("lfm2_colbert", name) for name in ("hidden", "attended")),
    *(Golden("colqwen3", name) for name in ("narrow", "default")),
    *(Golden("nemotron_colembed", name) for name in ("published", "short")),
    *(Golden("collfm2", name) for name in ("tiles", "wide")),
)
AS_SERVED = each(
    Golden("embeddinggemma", "mean"),
    Golden("moderncolbert", "hidden"),
    Golden("lfm2_colbert", "hidden"),
    Golden("colqwen3", "default"),
    Golden("nemotron_colembed", "published"),
    Golden("collfm2", "tiles"),
)
DOCUMENT = {"is_query": False}
#: Of a vector of length one on the GPU and the same on the CPU, or of a vector alone and in a batch.
TOLERANCE = 1e-4
#: Of vectors in bfloat16 and the library's in float32, on average: a short one may be off by more, as it may be in
#: transformers.
MEAN_COSINE = 0.999


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    assert torch.cuda.is_available(), "GPU tests need a CUDA device"


@contextmanager
def _engine(golden: Golden, **options: Any) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    # Small, because a failed test keeps its engine.
    options = {"gpu_memory_utilization": 0.05, "max_num_seqs": 32, **golden.engine_options(), **options}
    llm = LLM(str(golden.path), **options)
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module", params=EXACT)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Golden, Any]]:
    """A golden checkpoint and an engine that serves it in float32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with _engine(request.param, dtype="float32", enforce_eager=True) as llm:
        yield request.param, llm


def test_vectors_equal_the_library_s(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    worst = 0.0
    for case in golden.cases(pool_factor=1):
        got, want = vectors(ask(llm, **request(case)))[0], golden.arrays()[case["key"]]
        got, want = np.atleast_2d(got), np.atleast_2d(want)
        assert got.shape == want.shape, case["key"]
        worst = max(worst, float(np.abs(got - want).max()))
    print(f"{golden.plugin} {golden.name}: {worst:.1e} at most")
    assert worst < TOLERANCE


def test_neighbours_change_nothing(served: tuple[Golden, Any]) -> None:
    """One request of many texts or images, which the engine batches, and each alone."""
    golden, llm = served
    draw = random.Random(0)
    for kind in ("text", "image"):
        alike = [case for case in golden.cases(pool_factor=1) if kind in case and _options(case) == DOCUMENT]
        if not alike:
            assert kind == "image"
            continue
        cases = [draw.choice(alike) for _ in range(64)]
        together = vectors(ask(llm, **{kind: [request(case)[kind] for case in cases]}, **DOCUMENT))
        for case, got in zip(cases, together, strict=True):
            alone = vectors(ask(llm, **request(case)))[0]
            np.testing.assert_allclose(got, alone, atol=TOLERANCE, rtol=0, err_msg=case["key"])


def _options(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in request(case).items() if key not in {"text", "image"}}


def test_scores_equal_the_library_s(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    if "scores" not in golden.arrays():
        assert golden.plugin == "embeddinggemma"
        return
    meta, scores = golden.meta(), golden.arrays()["scores"]
    for index, query in enumerate(meta["queries"]):
        results = ask(llm, query=query, documents=list(map(document, meta["documents"])))["results"]
        got = {result["index"]: result["score"] for result in results}
        np.testing.assert_allclose([got[i] for i in range(len(got))], scores[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("golden", AS_SERVED)
def test_served_in_bfloat16_vectors_stay_near_the_library_s(golden: Golden) -> None:
    cosines = []
    with _engine(golden, dtype="bfloat16") as llm:
        for case in golden.cases(pool_factor=1):
            got, want = vectors(ask(llm, **request(case)))[0], golden.arrays()[case["key"]]
            got, want = np.atleast_2d(got), np.atleast_2d(want)
            assert got.shape == want.shape, case["key"]
            cosines.extend((got * want).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1))
    mean, least = np.mean(cosines), np.min(cosines)
    print(f"{golden.plugin} {golden.name} in bfloat16: cosine {mean:.5f} on average, {least:.4f} at least")
    assert mean > MEAN_COSINE
