r"""Attention of T5 over a flat batch of sequences: a learnt bias for each distance, and no scaling.

For a query token i and a key token j of one sequence, with b(j - i) the bucket of their distance,

.. math:: s_{ij} = q_i · k_j + B_{h, b(j-i)}

where h is the head. Source: Raffel et al. (2020), and transformers' ``modeling_t5.py`` (5.16).

``relative_bias_attention`` is the one entry: it chooses an implementation. The torch one is right everywhere.

Shape legend: T tokens, H heads, D head size, B and L as in ``Varlen``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from vllm_factory.varlen import PaddedGroup, Varlen


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """The bias of every distance; a constant of the weights, computed once at load.

    Attributes:
        values: ``[H, 2 * max_len - 1]``; entry ``j - i + max_len - 1`` belongs to the distance ``j - i``.
    """

    values: torch.Tensor

    def rows(self, first: int, count: int, length: int, varlen: Varlen) -> torch.Tensor:
        """``[H, count, L]`` bias of the queries from ``first`` on, for all keys.

        All layers share the object, and so the result where it is that of a whole sequence.
        """
        key = ("distance bias", id(self), length)
        if count < length:
            return self._rows(first, count, length)
        if key not in varlen.memo:
            varlen.memo[key] = self._rows(0, length, length)
        return varlen.memo[key]

    def _rows(self, first: int, count: int, length: int) -> torch.Tensor:
        position = torch.arange(length, device=self.values.device)
        query = position[first : first + count]
        return self.values[:, position[None, :] - query[:, None] + self.values.shape[1] // 2]


def distance_bucket(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Bucket of each signed ``distance`` (int64), key minus query: exact when near, logarithmic beyond.

    One half of the buckets is for keys behind the query, the other for the rest. In float32, so that rounding
    at the bucket edges is the reference's.
    """
    half = num_buckets // 2
    exact = half // 2
    magnitude = distance.abs()
    log_ratio = torch.log(magnitude.float() / exact) / math.log(max_distance / exact)
    far = (exact + (log_ratio * (half - exact)).to(torch.long)).clamp(max=half - 1)
    return (distance > 0) * half + torch.where(magnitude < exact, magnitude, far)


def distance_bias(table: torch.Tensor, max_len: int, max_distance: int) -> DistanceBias:
    """The bias for sequences of up to ``max_len`` tokens.

    Args:
        table: ``[buckets, H]``, as T5 learns it.
        max_len: Tokens of the longest sequence.
        max_distance: Distance at which the last bucket begins.
    """
    distance = torch.arange(-(max_len - 1), max_len, device=table.device)
    return DistanceBias(table[distance_bucket(distance, table.shape[0], max_distance)].T.contiguous())


def relative_bias_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: DistanceBias,
    varlen: Varlen,
) -> torch.Tensor:
    """Attention of each sequence over itself.

    Args:
        query, key, value: ``[T, H, D]``.
        bias: Bias of the scores.
        varlen: Boundaries of the sequences. Rows beyond them belong to nobody and come back as zeros.

    Returns:
        ``[T, H * D]``.
    """
    return relative_bias_attention_torch(query, key, value, bias, varlen)


def relative_bias_attention_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: DistanceBias,
    varlen: Varlen,
) -> torch.Tensor:
    """The torch implementation: padded groups of similar length."""
    return varlen.attend(query, key, value, partial(_group_attention, bias=bias, varlen=varlen))


def _group_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: PaddedGroup,
    bias: DistanceBias,
    varlen: Varlen,
) -> torch.Tensor:
    """``[B, H, L, D]`` each, to ``[B, H, L, D]``; a long sequence is done some query rows at a time."""
    batch, _, length, _ = query.shape
    rows = varlen.query_rows(batch, length)
    context = []
    for first in range(0, length, rows):
        part = query[:, :, first : first + rows]
        mask = bias.rows(first, part.shape[2], length, varlen).unsqueeze(0)
        if group.mask is not None:
            mask = mask.masked_fill(~group.mask[:, None, None, :], torch.finfo(mask.dtype).min)
        context.append(F.scaled_dot_product_attention(part, key, value, attn_mask=mask, scale=1.0))
    return torch.cat(context, dim=2)
