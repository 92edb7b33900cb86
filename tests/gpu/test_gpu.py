"""The plugin, unchanged, in vLLM on a GPU against the library on the same GPU. Run by ``scripts/gpu_proof.sh``."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from checkpoints import LABELS, TEXTS
from conftest import LOCAL_RECIPES, Library, each
from harness import assert_same_entities

pytestmark = pytest.mark.gpu

ENGINE_RECIPES = [
    *("span-v3", "span-v2-conv", "token-v3", "span-fused-layers", "token-spans"),
    *("mt5-span", "linker-span", "linker-token", "mmbert-span", "mmbert-token"),
]


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    assert torch.cuda.is_available(), "GPU tests need a CUDA device"


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", each(LOCAL_RECIPES))
def test_every_variant_equals_the_library_on_the_same_gpu(name: str, library: Library) -> None:
    reference = library.reference(name).to("cuda")
    engine = library.local(name)
    engine.network.to("cuda")
    engine.network.prepare(engine.max_tokens)
    want = [reference.predict_entities(text, LABELS, threshold=0.3) for text in TEXTS]
    got = engine.answer_together([{"text": text, "labels": LABELS, "threshold": 0.3} for text in TEXTS])
    for one, expected in zip(got, want, strict=True):
        assert_same_entities(one, expected)


def ask(llm: Any, data: dict[str, Any]) -> Any:
    return llm.encode({"data": data}, pooling_task="plugin", use_tqdm=False)[0].outputs


@pytest.mark.parametrize("name", each(ENGINE_RECIPES))
def test_vllm_equals_the_library_on_the_same_gpu(name: str, library: Library) -> None:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(library.prepared(name)),
        dtype="float32",
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        max_num_seqs=32,
    )
    try:
        reference = library.reference(name).to("cuda")
        want = [reference.predict_entities(text, LABELS, threshold=0.3) for text in TEXTS]
        alone = [ask(llm, {"text": text, "labels": LABELS, "threshold": 0.3}) for text in TEXTS]
        together = ask(llm, {"text": TEXTS * 4, "labels": LABELS, "threshold": 0.3})
        for index, got in enumerate([*alone, *together]):
            assert_same_entities(got, want[index % len(TEXTS)])
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
