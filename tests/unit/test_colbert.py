"""ColBERT without vLLM: tokens equal PyLate's, requests are checked, responses are readable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrieval_harness import Golden
from vllm_factory.io.colbert import ColbertPipeline
from vllm_factory.io.limits import Limits

GOLDENS = [Golden("moderncolbert", name) for name in ("hidden", "attended", "unexpanded")]
pytestmark = pytest.mark.moderncolbert


def pipeline(golden: Golden, limits: Limits | None = None, max_tokens: int = 512) -> ColbertPipeline:
    return ColbertPipeline.read(str(golden.path), None, max_tokens, limits or Limits())


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: g.name)
def test_tokens_are_pylate_s(golden: Golden) -> None:
    reads = pipeline(golden)
    cases = golden.cases(pool_factor=1)
    assert len(cases) > 10
    for case in cases:
        data: dict[str, Any] = {
            "text": case["text"],
            "is_query": case["is_query"],
            "prompt_name": case["prompt_name"],
        }
        encoded = reads.encode(reads.parse(data))
        want = golden.arrays()[f"{case['key']}_ids"]
        np.testing.assert_array_equal(encoded.prompts[0].token_ids, want, case["key"])
        kept = len(want) - encoded.prompts[0].arrays[1].size
        assert kept == golden.arrays()[case["key"]].shape[0], case["key"]
