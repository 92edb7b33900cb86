"""The encoder against transformers' T5EncoderModel and MT5EncoderModel over ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MT5Config, MT5EncoderModel, T5Config, T5EncoderModel

from vllm_factory import varlen
from vllm_factory.errors import CheckpointError
from vllm_factory.kernels.relative_bias_attention import distance_bucket
from vllm_factory.models.t5_encoder import T5Encoder, T5EncoderConfig, T5LayerNorm
from vllm_factory.varlen import Varlen

pytestmark = pytest.mark.mt5_gliner

TINY: dict[str, Any] = {
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
MODELS = {"t5": (T5Config, T5EncoderModel), "mt5": (MT5Config, MT5EncoderModel)}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mt5": ("mt5", {}),
    "t5-relu": ("t5", {}),
    "t5-gated-gelu": ("t5", {"feed_forward_proj": "gated-gelu"}),
    "t5-gated-silu": ("t5", {"feed_forward_proj": "gated-silu"}),
    "t5-gelu": ("t5", {"feed_forward_proj": "gelu"}),
    "mt5-wide-heads": ("mt5", {"d_kv": 24}),
    "mt5-narrow-heads": ("mt5", {"d_kv": 4, "num_heads": 3}),
    "mt5-few-buckets": ("mt5", {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}),
    "mt5-large-epsilon": ("mt5", {"layer_norm_epsilon": 1e-2}),
}
LENGTHS = [1, 7, 63, 2, 30, 29, 64, 13]


def build(model_type: str, overrides: dict[str, Any]) -> tuple[Any, T5Encoder]:
    torch.manual_seed(0)
    config_class, model_class = MODELS[model_type]
    reference = model_class(config_class(**{**TINY, **overrides})).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = T5Encoder(T5EncoderConfig.from_dict(reference.config.to_dict())).eval()
    weights = {k: v for k, v in reference.state_dict().items() if k != "encoder.embed_tokens.weight"}
    ours.load_state_dict(weights, strict=True)
    ours.prepare(max_len=256)
    return reference, ours


def run(model: T5Encoder, sequences: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Per sequence, the output of every layer."""
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    layers = model(torch.cat(sequences), positions, Varlen(lengths, torch.device("cpu")))
    return [list(rows) for rows in zip(*(layer.split(lengths) for layer in layers), strict=True)]


@pytest.mark.parametrize(("model_type", "overrides"), CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_equals_transformers_in_a_ragged_batch(model_type: str, overrides: dict[str, Any]) -> None:
    reference, ours = build(model_type, overrides)
    sequences = [torch.randint(0, 100, (n,)) for n in LENGTHS]
    for sequence, layers in zip(sequences, run(ours, sequences), strict=True):
        expected = reference(sequence[None], output_hidden_states=True).hidden_states[1:]
        assert len(layers) == len(expected)
        for got, want in zip(layers, expected, strict=True):
            torch.testing.assert_close(got, want[0], atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_long_sequences_reach_the_last_buckets() -> None:
    reference, ours = build("mt5", {})
    sequence = torch.randint(0, 100, (255,))
    want = reference(sequence[None]).last_hidden_state[0]
    torch.testing.assert_close(run(ours, [sequence])[0][-1], want, atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_a_sequence_beyond_the_budget_is_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = build("mt5", {})
    sequences = [torch.randint(0, 100, (n,)) for n in (50, 49, 3)]
    want = run(ours, sequences)
    monkeypatch.setitem(varlen.GROUP_BUDGETS, "cpu", 300)
    for got, expected in zip(run(ours, sequences), want, strict=True):
        torch.testing.assert_close(got[-1], expected[-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 4096), (6, 7)])
def test_buckets_are_the_reference_s(num_buckets: int, max_distance: int) -> None:
    attention = MODELS["t5"][1](T5Config(**TINY)).encoder.block[0].layer[0].SelfAttention
    distance = torch.arange(-5000, 5000)
    want = attention._relative_position_bucket(distance, True, num_buckets, max_distance)
    assert torch.equal(distance_bucket(distance, num_buckets, max_distance), want)


@torch.no_grad()
def test_rows_behind_the_last_sequence_change_nothing() -> None:
    _, ours = build("mt5", {})
    ids = torch.randint(0, 100, (10,))
    alone = run(ours, [ids])[0][-1]
    padded = torch.cat([ids, torch.randint(0, 100, (5,))])
    output = ours(padded, torch.arange(15), Varlen([10, 0], torch.device("cpu")))[-1]
    assert output.shape == (15, 32)
    torch.testing.assert_close(output[:10], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_sixteen_bits_stay_close_and_finite(dtype: torch.dtype) -> None:
    _, ours = build("mt5", {})
    sequences = [torch.randint(0, 100, (n,)) for n in LENGTHS]
    exact = run(ours, sequences)
    ours.to(dtype).prepare(256)
    for got, want in zip(run(ours, sequences), exact, strict=True):
        assert torch.cosine_similarity(got[-1].float(), want[-1], dim=-1).min() > 0.995


@torch.no_grad()
def test_float16_overflow_is_clamped_for_each_value() -> None:
    _, ours = build("mt5", {})
    ours.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(3e4)
    ours.half().prepare(64)
    short, long = torch.randint(0, 100, (3,)), torch.randint(0, 100, (40,))
    alone = run(ours, [short])[0]
    assert all(layer.isfinite().all() for layer in alone)
    torch.testing.assert_close(run(ours, [long, short])[1], alone, atol=2e-2, rtol=2e-2)


def test_the_norm_s_variance_is_float32() -> None:
    norm = T5LayerNorm(4, 1e-6).half()
    assert norm(torch.full((1, 4), 300.0, dtype=torch.float16)).tolist() == [[1.0] * 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "gated-nope"}, "gated-nope"),
        ({"feed_forward_proj": "a-b-relu"}, "a-b-relu"),
        ({"relative_attention_num_buckets": 7}, "relative_attention_num_buckets 7"),
        ({"relative_attention_max_distance": 8}, "relative_attention_max_distance 8"),
    ],
)
def test_contradictory_configurations_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        T5EncoderConfig.from_dict({**TINY, **change})


def test_missing_keys_are_named() -> None:
    with pytest.raises(CheckpointError, match="d_model"):
        T5EncoderConfig.from_dict({"vocab_size": 3})
