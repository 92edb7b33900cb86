"""Counting layers of GLiNER2: from the vectors of a schema's fields to those of its n-th record.

Every layer runs a gated recurrent unit over the record numbers, beginning from the field's own vector, and then
mixes in its own way. Parameter names and formulas are those of gliner2 2.1.0, ``layers.py``. The fields of all
schemas of an engine step are one flat batch; those of which most records are wanted come first, so that step t
works on a prefix of it.

Shape legend: N fields, Q field vectors of all records, R records of a group, M fields of one record,
D hidden size, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vllm_factory.poolers.ragged import gather, runs, table, upload

#: Records that a schema may have at most; the count head tells 0 to 19.
MAX_RECORDS = 20
#: Padded fields of one group of records, where the fields of a record see each other.
FIELD_BUDGET = 2**15


@dataclass(frozen=True, slots=True)
class Records:
    """Which records the fields belong to, on the host.

    Attributes:
        alive: For each step, how many of the fields (from the first) have that record.
        members: For each record, the positions of its fields among the Q vectors, in the schema's order.
    """

    alive: Sequence[int]
    members: Sequence[np.ndarray]


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class RecordUnit(nn.Module):
    """A gated recurrent unit whose input at a step is the same for all rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))
        self.bias_ih_l0 = nn.Parameter(torch.empty(3 * size))
        self.bias_hh_l0 = nn.Parameter(torch.empty(3 * size))

    def forward(self, inputs: torch.Tensor, state: torch.Tensor, alive: Sequence[int]) -> torch.Tensor:
        """Step inputs ``[20, D]`` and first states ``[N, D]``, to ``[Q, D]``, step after step."""
        from_input = F.linear(inputs[: len(alive)], self.weight_ih_l0, self.bias_ih_l0)
        outputs = []
        for step, rows in zip(from_input, alive, strict=True):
            state = state[:rows]
            reset, update, new = step.chunk(3, dim=-1)
            old = F.linear(state, self.weight_hh_l0, self.bias_hh_l0)
            old_reset, old_update, old_new = old.chunk(3, dim=-1)
            keep = torch.sigmoid(update + old_update)
            proposal = torch.tanh(new + torch.sigmoid(reset + old_reset) * old_new)
            state = (1 - keep) * proposal + keep * state
            outputs.append(state)
        return torch.cat(outputs)


class CountingLayer(nn.Module):
    """What all of them share."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Embedding(MAX_RECORDS, hidden_size)
        self.gru = RecordUnit(hidden_size)

    def mix(self, states: torch.Tensor, fields: torch.Tensor, records: Records) -> torch.Tensor:
        """``[Q, D]`` states of the unit and vectors of their fields, to ``[Q, D]``."""
        raise NotImplementedError

    def forward(self, fields: torch.Tensor, records: Records) -> torch.Tensor:
        """``[N, D]`` to ``[Q, D]``."""
        states = self.gru(self.pos_embedding.weight, fields, records.alive)
        return self.mix(states, torch.cat([fields[:rows] for rows in records.alive]), records)


class CountLSTM(CountingLayer):
    """``count_lstm``: a projection of state and field."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.projector = mlp([2 * hidden_size, 4 * hidden_size, hidden_size])

    def mix(self, states: torch.Tensor, fields: torch.Tensor, records: Records) -> torch.Tensor:
        return self.projector(torch.cat([states, fields], dim=-1))


class FieldAttention(nn.Module):
    """Attention of ``nn.TransformerEncoderLayer``, under its parameter names."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * size))
        self.out_proj = nn.Linear(size, size)

    def forward(self, fields: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``[R, M, size]`` and ``[R, M]`` true for fields, to ``[R, M, size]``."""
        projected = F.linear(fields, self.in_proj_weight, self.in_proj_bias)
        heads = projected.view(*fields.shape[:2], 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        return self.out_proj(seen.transpose(1, 2).flatten(2))


class FieldLayer(nn.Module):
    """A post-norm transformer layer over the fields of a record."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.self_attn = FieldAttention(size, num_heads)
        self.linear1 = nn.Linear(size, 2 * size)
        self.linear2 = nn.Linear(2 * size, size)
        self.norm1 = nn.LayerNorm(size)
        self.norm2 = nn.LayerNorm(size)

    def forward(self, fields: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        fields = self.norm1(fields + self.self_attn(fields, mask))
        return self.norm2(fields + self.linear2(self.linear1(fields).relu()))


class FieldLayers(nn.Module):
    """Two layers, under the names of ``nn.TransformerEncoder``."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FieldLayer(size, num_heads) for _ in range(2)])

    def forward(self, fields: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            fields = layer(fields, mask)
        return fields


class FieldTransformer(nn.Module):
    """A narrow transformer over the fields of each record."""

    WIDTH, HEADS = 128, 4

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.in_projector = nn.Linear(hidden_size, self.WIDTH)
        self.transformer = FieldLayers(self.WIDTH, self.HEADS)
        self.out_projector = mlp([self.WIDTH + hidden_size, hidden_size, hidden_size, hidden_size])

    def forward(self, fields: torch.Tensor, records: Records) -> torch.Tensor:
        """``[Q, D]`` to ``[Q, D]``."""
        narrow = self.in_projector(fields)
        seen = torch.empty_like(narrow)
        order = sorted(records.members, key=lambda members: -members.size)
        for first, last in runs([members.size for members in order], FIELD_BUDGET):
            index = upload(table(order[first:last]), fields.device)
            mask = index >= 0
            seen[index[mask]] = self.transformer(gather(narrow, index), mask)[mask]
        return self.out_projector(torch.cat([seen, fields], dim=-1))


class CountLSTMv2(CountingLayer):
    """``count_lstm_v2``: the fields of a record see each other."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.transformer = FieldTransformer(hidden_size)

    def mix(self, states: torch.Tensor, fields: torch.Tensor, records: Records) -> torch.Tensor:
        return self.transformer(states + fields, records)


class CountLSTMoE(CountingLayer):
    """``count_lstm_moe``: a gated sum of expert projections."""

    EXPERTS = 4

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        inner = 2 * hidden_size
        self.w1 = nn.Parameter(torch.empty(self.EXPERTS, hidden_size, inner))
        self.b1 = nn.Parameter(torch.empty(self.EXPERTS, inner))
        self.w2 = nn.Parameter(torch.empty(self.EXPERTS, inner, hidden_size))
        self.b2 = nn.Parameter(torch.empty(self.EXPERTS, hidden_size))
        self.router = nn.Sequential(
            nn.Linear(hidden_size, hidden_size),
            nn.GELU(),
            nn.Linear(hidden_size, self.EXPERTS),
            nn.Softmax(dim=-1),
        )

    def mix(self, states: torch.Tensor, fields: torch.Tensor, records: Records) -> torch.Tensor:
        inner = F.gelu(torch.einsum("qd,edh->qeh", states, self.w1) + self.b1)
        experts = torch.einsum("qeh,ehd->qed", inner, self.w2) + self.b2
        return (self.router(states).unsqueeze(-1) * experts).sum(dim=1)


_LAYERS: dict[str, type[CountLSTM] | type[CountLSTMv2] | type[CountLSTMoE]] = {
    "count_lstm": CountLSTM,
    "count_lstm_v2": CountLSTMv2,
    "count_lstm_moe": CountLSTMoE,
}


def counting_layer(kind: str, hidden_size: int) -> CountingLayer:
    """The layer that a configuration calls ``kind``."""
    return _LAYERS[kind](hidden_size)
