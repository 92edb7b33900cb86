"""A model class of vLLM's skips tensors whose name it does not know; ours does not let it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm.model_executor.models.utils import WeightsMapper

from vllm_factory.compat.vllm_api import load_model_of_vllm_strictly
from vllm_factory.errors import CheckpointError

pytestmark = [pytest.mark.mmbert_gliner, pytest.mark.embeddinggemma, pytest.mark.lfm2_colbert]


class Lenient(nn.Module):
    """Loads as vLLM's ModernBERT does."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"layers.": "encoder_layer.layers."})

    def __init__(self) -> None:
        super().__init__()
        self.encoder_layer = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])})
        self.norm = nn.LayerNorm(2, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        mapped = dict(self.hf_to_vllm_mapper.apply(weights))
        for name in parameters.keys() & mapped.keys():
            parameters[name].data.copy_(mapped[name])
        return parameters.keys() & mapped.keys()


WEIGHTS = {
    "layers.0.weight": torch.ones(2, 2),
    "layers.0.bias": torch.ones(2),
    "norm.weight": torch.ones(2),
}


def test_all_weights_find_their_parameters() -> None:
    model = Lenient()
    assert load_model_of_vllm_strictly(model, list(WEIGHTS.items())) == dict(model.named_parameters()).keys()
    assert all(parameter.eq(1).all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.bias": torch.ones(2)}, "tensors that nobody takes: norm.bias;"),
        ({"layers.1.weight": torch.ones(2, 2)}, "nobody takes: encoder_layer.layers.1.weight;"),
        ({"layers.0.bias": None}, "parameters that nobody fills: encoder_layer.layers.0.bias"),
    ],
    ids=["bias", "layer", "missing"],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor | None], message: str) -> None:
    weights = [(name, tensor) for name, tensor in {**WEIGHTS, **change}.items() if tensor is not None]
    with pytest.raises(CheckpointError, match=message):
        load_model_of_vllm_strictly(Lenient(), weights)


class Stacked(nn.Module):
    """One parameter of two tensors, as vLLM has them; loaded as soon as one of the two is there."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked={".w1": (".w13", 0), ".w3": (".w13", 1)})

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"w13": nn.Linear(2, 2, bias=False)})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in self.hf_to_vllm_mapper.apply(weights)}


@pytest.mark.parametrize("left_out", ["mlp.w1.weight", "mlp.w3.weight"])
def test_a_part_of_a_parameter_that_is_missing_is_named(left_out: str) -> None:
    parts = {name: torch.ones(1, 2) for name in ("mlp.w1.weight", "mlp.w3.weight")}
    assert load_model_of_vllm_strictly(Stacked(), list(parts.items())) == {"mlp.w13.weight"}
    del parts[left_out]
    with pytest.raises(CheckpointError, match=f"parameters that nobody fills: {left_out}$"):
        load_model_of_vllm_strictly(Stacked(), list(parts.items()))
