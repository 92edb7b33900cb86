"""The encoder against transformers' DebertaV2Model, sequence by sequence, over ragged batches."""

from __future__ import annotations

import pytest
import torch
from transformers import DebertaV2Config, DebertaV2Model

from vllm_factory import varlen
from vllm_factory.errors import CheckpointError
from vllm_factory.models.deberta_v2 import DebertaConfig, DebertaModel
from vllm_factory.varlen import Varlen

pytestmark = pytest.mark.deberta_gliner

TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
V3 = {
    "relative_attention": True,
    "position_buckets": 8,
    "max_relative_positions": -1,
    "max_position_embeddings": 64,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
CONFIGS = {
    "v3": V3,
    "v3-string-pos-att-type": {**V3, "pos_att_type": "p2c|c2p"},
    "v3-large-buckets": {**V3, "position_buckets": 32, "max_position_embeddings": 512},
    "v2-xlarge-conv": {**V3, "conv_kernel_size": 3, "conv_act": "gelu", "attention_head_size": 8},
    "conv-tanh-groups": {**V3, "conv_kernel_size": 5, "conv_groups": 4},
    "separate-projections": {**V3, "share_att_key": False},
    "c2p-only": {**V3, "pos_att_type": ["c2p"]},
    "p2c-only": {**V3, "pos_att_type": ["p2c"], "share_att_key": False},
    "no-position-terms": {**V3, "pos_att_type": []},
    "no-buckets": {**V3, "position_buckets": -1, "norm_rel_ebd": "none"},
    "no-buckets-short-span": {**V3, "position_buckets": -1, "max_relative_positions": 6},
    "absolute-and-types": {**V3, "position_biased_input": True, "type_vocab_size": 2},
    "plain-attention": {"relative_attention": False, "position_biased_input": True},
    "factorised-embedding": {**V3, "embedding_size": 24},
}
LENGTHS = [1, 7, 63, 2, 30, 29, 64, 13]


def build(overrides: dict) -> tuple[DebertaV2Model, DebertaModel]:
    torch.manual_seed(0)
    reference = DebertaV2Model(DebertaV2Config(**TINY, **overrides)).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = DebertaModel(DebertaConfig.from_dict(reference.config.to_dict())).eval()
    ours.load_state_dict(reference.state_dict(), strict=True)
    ours.prepare(max_len=128)
    return reference, ours


def run(model: DebertaModel, sequences: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Per sequence, the output of every layer."""
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    layers = model(torch.cat(sequences), positions, Varlen(lengths, torch.device("cpu")))
    return [list(rows) for rows in zip(*(layer.split(lengths) for layer in layers), strict=True)]


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_equals_transformers_in_a_ragged_batch(overrides: dict) -> None:
    reference, ours = build(overrides)
    sequences = [torch.randint(0, 100, (n,)) for n in LENGTHS]
    for sequence, layers in zip(sequences, run(ours, sequences), strict=True):
        expected = reference(sequence[None], output_hidden_states=True).hidden_states[1:]
        for got, want in zip(layers, expected, strict=True):
            torch.testing.assert_close(got, want[0], atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_long_sequences_reach_the_logarithmic_buckets() -> None:
    reference, ours = build({**V3, "max_position_embeddings": 100})
    sequence = torch.randint(0, 100, (127,))
    want = reference(sequence[None]).last_hidden_state[0]
    torch.testing.assert_close(run(ours, [sequence])[0][-1], want, atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_a_sequence_beyond_the_budget_is_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = build(V3)
    sequences = [torch.randint(0, 100, (n,)) for n in (50, 49, 3)]
    want = run(ours, sequences)
    monkeypatch.setitem(varlen.GROUP_BUDGETS, "cpu", 300)
    for got, expected in zip(run(ours, sequences), want, strict=True):
        torch.testing.assert_close(got[-1], expected[-1], atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_rows_behind_the_last_sequence_change_nothing() -> None:
    _, ours = build(V3)
    ids = torch.randint(0, 100, (10,))
    alone = run(ours, [ids])[0][-1]
    padded = torch.cat([ids, torch.randint(0, 100, (5,))])
    positions = torch.arange(15)
    output = ours(padded, positions, Varlen([10, 0], torch.device("cpu")))[-1]
    assert output.shape == (15, 32)
    torch.testing.assert_close(output[:10], alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"hidden_act": "nope"}, "no activation"),
        ({"relative_attention": True, "pos_att_type": ["p2p"]}, "p2p"),
    ],
)
def test_contradictory_configurations_are_refused(change: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        DebertaConfig.from_dict({**TINY, **change})


def test_missing_keys_are_named() -> None:
    with pytest.raises(CheckpointError, match="hidden_size"):
        DebertaConfig.from_dict({"vocab_size": 3})
