r"""Disentangled attention of DeBERTa v2/v3 over a flat batch of sequences.

For a query token i and a key token j of one sequence, with b(i - j) the logarithmic bucket of their distance,

.. math:: s_{ij} = (q_i · k_j + q_i · K^{pos}_{b(i-j)} + k_j · Q^{pos}_{b(i-j)}) / sqrt(d · f)

where f is 1 plus the number of position terms (c2p, p2c) in use. Source: He et al., DeBERTa (2021), and
transformers' ``modeling_deberta_v2.py`` (5.16), whose order of operations the torch path keeps.

``disentangled_attention`` is the one entry: it chooses an implementation. The torch one is right everywhere.

Shape legend: T tokens, H heads, D head size, P rows of the position tables, B and L as in ``Varlen``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from vllm_factory.varlen import PaddedGroup, Varlen


@dataclass(frozen=True, slots=True)
class RelativeTables:
    """What the position terms need; constants of the weights, computed once at load.

    Attributes:
        bucket: ``[2 * max_len - 1]`` int64; entry ``i - j + max_len - 1`` is the row of the tables for the
            distance ``i - j``.
        pos_key: ``[H, P, D]`` for content-to-position, or ``None`` when the checkpoint has no c2p.
        pos_query: ``[H, P, D]`` for position-to-content, or ``None`` when it has no p2c.
    """

    bucket: torch.Tensor
    pos_key: torch.Tensor | None
    pos_query: torch.Tensor | None

    def index(self, length: int, varlen: Varlen) -> torch.Tensor:
        """``[L, L]`` rows of the tables for query i and key j; all layers share ``bucket`` and so this."""
        key = ("relative", length)
        if key not in varlen.memo:
            max_len = (self.bucket.shape[0] + 1) // 2
            position = torch.arange(length, device=self.bucket.device)
            varlen.memo[key] = self.bucket[position[:, None] - position[None, :] + (max_len - 1)]
        return varlen.memo[key]


def log_bucket(distance: torch.Tensor, num_buckets: int, max_position: int) -> torch.Tensor:
    """Bucket of each signed ``distance`` (int64): itself when near, logarithmic beyond half the buckets.

    Computed on the tensor's device in float32, so that rounding at the bucket edges is the reference's.
    """
    if num_buckets <= 0 or max_position <= 0:
        return distance
    middle = num_buckets // 2
    near = (distance < middle) & (distance > -middle)
    magnitude = torch.where(near, torch.full_like(distance, middle - 1), distance.abs())
    log_ratio = torch.log(magnitude / middle) / torch.log(torch.tensor((max_position - 1) / middle))
    far = torch.ceil(log_ratio * (middle - 1)) + middle
    bucket = torch.where(magnitude <= middle, distance.type_as(far), far * torch.sign(distance))
    return bucket.to(torch.long)


def bucket_table(max_len: int, num_buckets: int, max_position: int, device: torch.device) -> torch.Tensor:
    """:attr:`RelativeTables.bucket` for sequences of up to ``max_len`` tokens."""
    span = num_buckets if num_buckets > 0 else max_position
    distance = torch.arange(-(max_len - 1), max_len, device=device)
    return torch.clamp(log_bucket(distance, num_buckets, max_position) + span, 0, 2 * span - 1)


def disentangled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: RelativeTables | None,
    varlen: Varlen,
) -> torch.Tensor:
    """Attention of each sequence over itself.

    Args:
        query, key, value: ``[T, H, D]``.
        tables: Position tables; ``None`` for plain attention.
        varlen: Boundaries of the sequences. Rows beyond them belong to nobody and come back as zeros.

    Returns:
        ``[T, H * D]``.
    """
    return disentangled_attention_torch(query, key, value, tables, varlen)


def disentangled_attention_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: RelativeTables | None,
    varlen: Varlen,
) -> torch.Tensor:
    """The torch implementation: padded groups of similar length, scores materialised."""
    return varlen.attend(query, key, value, partial(_group_attention, tables=tables, varlen=varlen))


def _group_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: PaddedGroup,
    tables: RelativeTables | None,
    varlen: Varlen,
) -> torch.Tensor:
    """``[B, H, L, D]`` each, to ``[B, H, L, D]``; a long sequence is done some query rows at a time."""
    terms = 1 if tables is None else 1 + sum(t is not None for t in (tables.pos_key, tables.pos_query))
    scale = math.sqrt(query.shape[-1] * terms)
    scaled_key = (key / scale).transpose(-1, -2)
    p2c = None
    if tables is not None and tables.pos_query is not None:
        p2c = key @ tables.pos_query.transpose(-1, -2)
    batch, _, length, _ = query.shape
    rows = varlen.query_rows(batch, length)
    context = []
    for first in range(0, length, rows):
        part = query[:, :, first : first + rows]
        scores = part @ scaled_key
        if tables is not None:
            index = tables.index(length, varlen)[first : first + rows]
            scores = _add_position_terms(scores, part, p2c, tables.pos_key, index, scale)
        if group.mask is not None:
            scores = scores.masked_fill(~group.mask[:, None, None, :], torch.finfo(scores.dtype).min)
        context.append(torch.softmax(scores, dim=-1) @ value)
    return torch.cat(context, dim=2)


def _add_position_terms(
    scores: torch.Tensor,
    query: torch.Tensor,
    p2c: torch.Tensor | None,
    pos_key: torch.Tensor | None,
    index: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Add to ``[B, H, R, L]`` scores of R query rows the terms that ``index`` ``[R, L]`` selects.

    ``p2c`` is ``[B, H, L, P]``: every key with every row of the table.
    """
    if pos_key is not None:
        c2p = query @ pos_key.transpose(-1, -2)
        scores = scores + torch.gather(c2p, -1, index.expand_as(scores)) / scale
    if p2c is not None:
        # Rows of p2c are keys; buckets are odd, so the transposed index selects b(query - key).
        keys_by_queries = index.T.expand(*scores.shape[:2], *index.T.shape)
        scores = scores + torch.gather(p2c, -1, keys_by_queries).transpose(-1, -2) / scale
    return scores
