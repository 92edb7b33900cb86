"""A retrieval checkpoint with a tensor too many or too few stops the start, and the message names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine import engine

from retrieval_harness import COLBERTS, EMBEDDERS, Golden, each
from vllm_factory.errors import CheckpointError

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="vLLM is not installed: make install")

LFM2 = next(golden for golden in COLBERTS if golden.plugin == "lfm2_colbert")


@pytest.mark.parametrize("tensor", ["self_attn.k_proj.weight", "norm.weight", "extra.weight"])
@pytest.mark.parametrize("golden", each(EMBEDDERS[0], LFM2))
def test_a_checkpoint_that_does_not_fit_is_refused(golden: Golden, tensor: str, tmp_path: Path) -> None:
    shutil.copytree(golden.path, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    weights = load_file(file)
    name = next((name for name in weights if name.endswith(tensor)), None)
    if name is None:
        name, weights = tensor, {**weights, tensor: torch.zeros(1)}
    else:
        del weights[name]
    save_file(weights, file, {"format": "pt"})
    message = name.rpartition(".")[0]
    with pytest.raises(CheckpointError, match=message), engine(tmp_path / "copy", **golden.engine_options()):
        pass
