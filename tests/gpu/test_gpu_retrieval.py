"""Retrieval models in vLLM on a GPU against the library's stored results. Run by ``scripts/gpu_proof.sh``.

In float32. The stored results come from a CPU, so besides the model this compares two kinds of arithmetic.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from retrieval_harness import Golden, ask, document, each, request, vectors

pytestmark = pytest.mark.gpu

GOLDENS = each(
    *(Golden("embeddinggemma", name) for name in ("mean", "joined")),
    *(Golden("moderncolbert", name) for name in ("hidden", "attended")),
    *(Golden("lfm2_colbert", name) for name in ("hidden", "attended")),
    *(Golden("colqwen3", name) for name in ("narrow", "default")),
    *(Golden("nemotron_colembed", name) for name in ("published", "short")),
    *(Golden("collfm2", name) for name in ("tiles", "wide")),
)
#: Of a vector of length one on the GPU and the same on the CPU.
TOLERANCE = 1e-3
#: Of a vector alone and in a batch.
BATCH_TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    assert torch.cuda.is_available(), "GPU tests need a CUDA device"


@pytest.fixture(scope="module", params=GOLDENS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Golden, Any]]:
    """A golden checkpoint and an engine that serves it."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    golden: Golden = request.param
    options = {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.3, "max_num_seqs": 32}
    llm = LLM(str(golden.path), **options, **golden.engine_options())
    yield golden, llm
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


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
        of_kind = [c for c in golden.cases(pool_factor=1) if list({"text", "image"} & set(c)) == [kind]]
        of_kind = [c for c in of_kind if not c.get("is_query") and not c.get("prompt_name") and not c.get("prompt")]
        of_kind = [c for c in of_kind if not c.get("dimensions")]
        if not of_kind:
            continue
        cases = [draw.choice(of_kind) for _ in range(64)]
        options = {k: v for k, v in request(cases[0]).items() if k == "is_query"}
        together = vectors(ask(llm, **{kind: [request(case)[kind] for case in cases], **options}))
        for case, got in zip(cases, together, strict=True):
            alone = vectors(ask(llm, **request(case)))[0]
            np.testing.assert_allclose(got, alone, atol=BATCH_TOLERANCE, rtol=0, err_msg=case["key"])


def test_scores_equal_the_library_s(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    if "scores" not in golden.arrays():
        assert golden.plugin == "embeddinggemma"
        return
    meta, scores = golden.meta(), golden.arrays()["scores"]
    for index, query in enumerate(meta["queries"]):
        results = ask(llm, query=query, documents=list(map(document, meta["documents"])))["results"]
        got = {result["index"]: result["score"] for result in results}
        np.testing.assert_allclose([got[i] for i in range(len(got))], scores[index], rtol=1e-3, atol=1e-3)
