"""DeBERTa v2/v3 encoder over a flat batch of sequences. Plain torch: no vLLM import.

Covers what checkpoints of the family use, read from the configuration and never assumed: absolute position
embeddings or none, token types, factorised embeddings, content-to-position and position-to-content terms,
shared or separate position projections, normalised relative embeddings, and the convolution of v2-xlarge.
Module names follow transformers' ``DebertaV2Model`` (5.16), so published checkpoints load by name.

Shape legend: T tokens, E hidden size, H heads, D head size, P rows of the relative tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from vllm_factory.errors import CheckpointError, shown
from vllm_factory.kernels.disentangled_attention import (
    RelativeTables,
    bucket_table,
    disentangled_attention,
)
from vllm_factory.models.backbone import Backbone
from vllm_factory.varlen import Varlen


@dataclass(frozen=True, slots=True, kw_only=True)
class DebertaConfig:
    """The keys of a ``deberta-v2`` configuration that inference reads, with transformers' defaults."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-7
    relative_attention: bool = False
    #: -1 means ``max_position_embeddings``.
    max_relative_positions: int = -1
    #: Number of logarithmic buckets on each side; -1 for one row per distance.
    position_buckets: int = -1
    pos_att_type: tuple[str, ...] = ()
    share_att_key: bool = False
    #: ``"layer_norm"`` normalises the relative embeddings.
    norm_rel_ebd: str = "none"
    position_biased_input: bool = True
    #: 0 or absent means ``hidden_size``.
    embedding_size: int = 0
    #: 0 or absent means ``hidden_size / num_attention_heads``.
    attention_head_size: int = 0
    #: 0 for no convolution layer.
    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_act: str = "tanh"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DebertaConfig:
        """From the dictionary of a ``config.json``.

        Raises:
            CheckpointError: A required key is missing or contradicts another.
        """
        known = {f.name for f in fields(cls)}
        # A null means "not set" throughout transformers' configurations.
        given = {key: value for key, value in values.items() if key in known and value is not None}
        pos_att_type = given.get("pos_att_type", ())
        if isinstance(pos_att_type, str):
            pos_att_type = [part.strip() for part in pos_att_type.lower().split("|")]
        given["pos_att_type"] = tuple(pos_att_type)
        try:
            config = cls(**given)
        except TypeError as error:
            raise CheckpointError(f"encoder configuration: {error}") from error
        config.check()
        return config

    def check(self) -> None:
        """Refuse contradictions before weights are read."""
        if self.head_size * self.num_attention_heads != self.hidden_size and not self.attention_head_size:
            raise CheckpointError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if self.hidden_act not in ACT2FN:
            raise CheckpointError(f"hidden_act {shown(self.hidden_act)} is no activation of transformers")
        unknown = set(self.pos_att_type) - {"c2p", "p2c"}
        if self.relative_attention and unknown:
            raise CheckpointError(f"pos_att_type holds {sorted(unknown)}; this encoder knows c2p and p2c")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.attention_head_size or self.hidden_size // self.num_attention_heads

    @property
    def relative_span(self) -> int:
        """Half the number of rows of the relative embeddings in use."""
        return self.position_buckets if self.position_buckets > 0 else self.max_distance

    @property
    def max_distance(self) -> int:
        """Distance at which the last bucket begins."""
        return self.max_relative_positions if self.max_relative_positions >= 1 else self.max_position_embeddings


class DebertaEmbeddings(nn.Module):
    """Token embeddings, plus absolute positions and token type 0 where the checkpoint has them."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        size = config.embedding_size or config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size)
        self.position_embeddings = (
            nn.Embedding(config.max_position_embeddings, size) if config.position_biased_input else None
        )
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size) if config.type_vocab_size else None
        self.embed_proj = nn.Linear(size, config.hidden_size, bias=False) if size != config.hidden_size else None
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[T]`` ids and positions within each sequence, to ``[T, E]``."""
        hidden = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            # Profiling runs count positions beyond the table; requests never do (max_model_len).
            hidden = hidden + self.position_embeddings(
                positions.clamp(max=self.position_embeddings.num_embeddings - 1)
            )
        if self.token_type_embeddings is not None:
            hidden = hidden + self.token_type_embeddings.weight[0]
        if self.embed_proj is not None:
            hidden = self.embed_proj(hidden)
        return self.LayerNorm(hidden)


class DisentangledSelfAttention(nn.Module):
    """Query, key and value projections and the position tables derived from them."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_attention_heads * config.head_size
        self.query_proj = nn.Linear(config.hidden_size, width)
        self.key_proj = nn.Linear(config.hidden_size, width)
        self.value_proj = nn.Linear(config.hidden_size, width)
        separate = config.relative_attention and not config.share_att_key
        self.pos_key_proj = (
            nn.Linear(config.hidden_size, width) if separate and "c2p" in config.pos_att_type else None
        )
        self.pos_query_proj = (
            nn.Linear(config.hidden_size, width) if separate and "p2c" in config.pos_att_type else None
        )
        self._tables: RelativeTables | None = None

    def build_tables(self, relative_embeddings: torch.Tensor, bucket: torch.Tensor) -> None:
        """Project the relative embeddings ``[P, E]`` once; they depend on weights alone."""
        shared = self.config.share_att_key
        key_proj = self.key_proj if shared else self.pos_key_proj
        query_proj = self.query_proj if shared else self.pos_query_proj
        self._tables = RelativeTables(
            bucket=bucket,
            pos_key=self._project(key_proj, relative_embeddings, "c2p"),
            pos_query=self._project(query_proj, relative_embeddings, "p2c"),
        )

    def _project(self, projection: nn.Linear | None, rows: torch.Tensor, term: str) -> torch.Tensor | None:
        if projection is None or term not in self.config.pos_att_type:
            return None
        return self._heads(projection(rows)).transpose(0, 1).contiguous()

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(flat.shape[0], self.config.num_attention_heads, self.config.head_size)

    def forward(self, hidden: torch.Tensor, varlen: Varlen) -> torch.Tensor:
        """``[T, E]`` to ``[T, H * D]``."""
        return disentangled_attention(
            self._heads(self.query_proj(hidden)),
            self._heads(self.key_proj(hidden)),
            self._heads(self.value_proj(hidden)),
            self._tables,
            varlen,
        )


class ResidualOutput(nn.Module):
    """Dense layer, residual, layer norm: the end of the attention and of the feed-forward block."""

    def __init__(self, width: int, config: DebertaConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``[T, width]`` and ``[T, E]`` to ``[T, E]``."""
        return self.LayerNorm(self.dense(hidden) + residual)


class DebertaAttention(nn.Module):
    """Self-attention with its output projection."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.self = DisentangledSelfAttention(config)
        self.output = ResidualOutput(config.num_attention_heads * config.head_size, config)

    def forward(self, hidden: torch.Tensor, varlen: Varlen) -> torch.Tensor:
        """``[T, E]`` to ``[T, E]``."""
        return self.output(self.self(hidden, varlen), hidden)


class DebertaIntermediate(nn.Module):
    """First half of the feed-forward block."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, E]`` to ``[T, intermediate]``."""
        return self.act(self.dense(hidden))


class DebertaLayer(nn.Module):
    """One transformer layer."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.attention = DebertaAttention(config)
        self.intermediate = DebertaIntermediate(config)
        self.output = ResidualOutput(config.intermediate_size, config)

    def forward(self, hidden: torch.Tensor, varlen: Varlen) -> torch.Tensor:
        """``[T, E]`` to ``[T, E]``."""
        attended = self.attention(hidden, varlen)
        return self.output(self.intermediate(attended), attended)


class ConvLayer(nn.Module):
    """Convolution over the embeddings, added after the first layer (v2-xlarge and v2-xxlarge)."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        kernel = config.conv_kernel_size
        self.conv = nn.Conv1d(
            config.hidden_size,
            config.hidden_size,
            kernel,
            padding=(kernel - 1) // 2,
            groups=config.conv_groups,
        )
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.act = ACT2FN[config.conv_act]

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, varlen: Varlen) -> torch.Tensor:
        """``[T, E]`` embeddings and first layer's output, to ``[T, E]``."""
        grouping = varlen.grouping()
        padded = [self.conv(g.pad_with_zeros(embeddings).transpose(1, 2)) for g in grouping.groups]
        convolved = grouping.unpad([rows.transpose(1, 2) for rows in padded], embeddings.shape[0])
        return self.LayerNorm(hidden + self.act(convolved))


class DebertaEncoder(nn.Module):
    """The layers, and the relative embeddings that they share."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(DebertaLayer(config) for _ in range(config.num_hidden_layers))
        self.conv = ConvLayer(config) if config.conv_kernel_size > 0 else None
        self.rel_embeddings: nn.Embedding | None = None
        if config.relative_attention:
            self.rel_embeddings = nn.Embedding(2 * config.relative_span, config.hidden_size)
        norms = [part.strip() for part in config.norm_rel_ebd.lower().split("|")]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if "layer_norm" in norms else None

    def build_tables(self, max_len: int) -> None:
        """Precompute the position tables of every layer for sequences of up to ``max_len`` tokens."""
        if self.rel_embeddings is None:
            return
        rows = self.rel_embeddings.weight
        bucket = bucket_table(max_len, self.config.position_buckets, self.config.max_distance, rows.device)
        if self.LayerNorm is not None:
            rows = self.LayerNorm(rows)
        for layer in self._layers():
            layer.attention.self.build_tables(rows, bucket)

    def _layers(self) -> Iterator[DebertaLayer]:
        return (layer for layer in self.layer if isinstance(layer, DebertaLayer))

    def forward(self, embeddings: torch.Tensor, varlen: Varlen) -> list[torch.Tensor]:
        """Outputs of all layers, each ``[T, E]``."""
        outputs: list[torch.Tensor] = []
        hidden = embeddings
        for number, layer in enumerate(self._layers()):
            hidden = layer(hidden, varlen)
            if number == 0 and self.conv is not None:
                hidden = self.conv(embeddings, hidden, varlen)
            outputs.append(hidden)
        return outputs


class DebertaModel(Backbone):
    """Embeddings and encoder; see :class:`~vllm_factory.models.backbone.Backbone`."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.num_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.embeddings = DebertaEmbeddings(config)
        self.encoder = DebertaEncoder(config)

    @torch.no_grad()
    def prepare(self, max_len: int) -> None:
        """See :class:`~vllm_factory.models.backbone.Backbone`."""
        self.encoder.build_tables(max_len)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See :class:`~vllm_factory.models.backbone.Backbone`."""
        return self.embeddings.word_embeddings(input_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, varlen: Varlen) -> list[torch.Tensor]:
        """See :class:`~vllm_factory.models.backbone.Backbone`."""
        return self.encoder(self.embeddings(input_ids, positions), varlen)
