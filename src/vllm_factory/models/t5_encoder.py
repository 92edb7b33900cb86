"""Encoder of T5 and mT5 over a flat batch of sequences. Plain torch: no vLLM import.

Positions are known to the attention alone, as a bias for each distance that the first layer owns and all share.
Feed-forward blocks are gated or not, with any activation. Module names follow transformers' ``T5EncoderModel``
(5.16), so published checkpoints load by name; the embeddings are called ``shared``, as in the full model.

Shape legend: T tokens, E hidden size, H heads, D head size, which is independent of E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from vllm_factory.errors import CheckpointError, shown
from vllm_factory.kernels.relative_bias_attention import DistanceBias, distance_bias, relative_bias_attention
from vllm_factory.models.backbone import Backbone
from vllm_factory.varlen import Varlen


@dataclass(frozen=True, slots=True, kw_only=True)
class T5EncoderConfig:
    """The keys of a ``t5`` or ``mt5`` configuration that inference reads, with T5's defaults."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    #: An activation, or ``"gated-"`` and an activation.
    feed_forward_proj: str = "relu"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> T5EncoderConfig:
        """From the dictionary of a ``config.json``.

        Raises:
            CheckpointError: A required key is missing or contradicts another.
        """
        known = {f.name for f in fields(cls)}
        try:
            config = cls(**{key: value for key, value in values.items() if key in known and value is not None})
        except TypeError as error:
            raise CheckpointError(f"encoder configuration: {error}") from error
        config.check()
        return config

    def check(self) -> None:
        """Refuse contradictions before weights are read."""
        if self.activation not in ACT2FN or self.feed_forward_proj.count("-") > self.gated:
            raise CheckpointError(
                f"feed_forward_proj {shown(self.feed_forward_proj)}; expected an activation of transformers, "
                'or "gated-" and one'
            )
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or buckets % 2 or distance <= buckets // 4:
            raise CheckpointError(
                f"relative_attention_num_buckets {buckets} and relative_attention_max_distance {distance}; "
                "expected an even number of 4 or more, and more than a quarter of it"
            )

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block multiplies two projections."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def activation(self) -> str:
        """transformers' name of the activation."""
        # "gated-gelu" has meant the tanh approximation since T5 1.1; transformers keeps that.
        return "gelu_new" if self.feed_forward_proj == "gated-gelu" else self.feed_forward_proj.split("-")[-1]


class T5LayerNorm(nn.Module):
    """Root mean square norm: no mean, no bias, variance in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, E]`` to ``[T, E]``."""
        variance = hidden.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + self.eps)).to(self.weight.dtype)


class T5Attention(nn.Module):
    """Query, key, value and output projections; in the first layer also the bias that all layers use."""

    def __init__(self, config: T5EncoderConfig, has_bias: bool) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.d_kv
        self.q = nn.Linear(config.d_model, width, bias=False)
        self.k = nn.Linear(config.d_model, width, bias=False)
        self.v = nn.Linear(config.d_model, width, bias=False)
        self.o = nn.Linear(width, config.d_model, bias=False)
        self.relative_attention_bias = (
            nn.Embedding(config.relative_attention_num_buckets, config.num_heads) if has_bias else None
        )

    def forward(self, hidden: torch.Tensor, bias: DistanceBias, varlen: Varlen) -> torch.Tensor:
        """``[T, E]`` to ``[T, E]``."""
        shape = (hidden.shape[0], self.config.num_heads, self.config.d_kv)
        query, key, value = (project(hidden).view(shape) for project in (self.q, self.k, self.v))
        return self.o(relative_bias_attention(query, key, value, bias, varlen))


class T5SelfAttentionBlock(nn.Module):
    """Norm, attention, residual."""

    def __init__(self, config: T5EncoderConfig, has_bias: bool) -> None:
        super().__init__()
        self.SelfAttention = T5Attention(config, has_bias)
        self.layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)

    def forward(self, hidden: torch.Tensor, bias: DistanceBias, varlen: Varlen) -> torch.Tensor:
        """``[T, E]`` to ``[T, E]``."""
        return hidden + self.SelfAttention(self.layer_norm(hidden), bias, varlen)


class T5Dense(nn.Module):
    """Two dense layers around an activation."""

    def __init__(self, config: T5EncoderConfig) -> None:
        super().__init__()
        self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.act = ACT2FN[config.activation]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, E]`` to ``[T, E]``."""
        return self.wo(self.act(self.wi(hidden)))


class T5GatedDense(nn.Module):
    """As :class:`T5Dense`, with a second projection that multiplies the activation."""

    def __init__(self, config: T5EncoderConfig) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.act = ACT2FN[config.activation]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, E]`` to ``[T, E]``."""
        return self.wo(self.act(self.wi_0(hidden)) * self.wi_1(hidden))


class T5FeedForwardBlock(nn.Module):
    """Norm, dense layers, residual."""

    def __init__(self, config: T5EncoderConfig) -> None:
        super().__init__()
        self.DenseReluDense = T5GatedDense(config) if config.gated else T5Dense(config)
        self.layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, E]`` to ``[T, E]``."""
        return hidden + self.DenseReluDense(self.layer_norm(hidden))


class T5Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, config: T5EncoderConfig, has_bias: bool) -> None:
        super().__init__()
        self.layer = nn.ModuleList([T5SelfAttentionBlock(config, has_bias), T5FeedForwardBlock(config)])

    def forward(self, hidden: torch.Tensor, bias: DistanceBias, varlen: Varlen) -> torch.Tensor:
        """``[T, E]`` to ``[T, E]``."""
        attended = _within_float16(self.layer[0](hidden, bias, varlen))
        return _within_float16(self.layer[1](attended))


class T5Stack(nn.Module):
    """The layers, and the norm behind the last."""

    def __init__(self, config: T5EncoderConfig) -> None:
        super().__init__()
        self.block = nn.ModuleList(T5Layer(config, has_bias=i == 0) for i in range(config.num_layers))
        self.final_layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)

    def forward(self, hidden: torch.Tensor, bias: DistanceBias, varlen: Varlen) -> list[torch.Tensor]:
        """Outputs of all layers, each ``[T, E]``; the last one normalised."""
        outputs = []
        for layer in self.block:
            hidden = layer(hidden, bias, varlen)
            outputs.append(hidden)
        return [*outputs[:-1], self.final_layer_norm(hidden)]


class T5Encoder(Backbone):
    """Embeddings and encoder; see :class:`~vllm_factory.models.backbone.Backbone`."""

    def __init__(self, config: T5EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.num_layers = config.num_layers
        self.hidden_size = config.d_model
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(config)
        self._bias: DistanceBias | None = None

    @torch.no_grad()
    def prepare(self, max_len: int) -> None:
        """See :class:`~vllm_factory.models.backbone.Backbone`."""
        table = self.encoder.get_parameter("block.0.layer.0.SelfAttention.relative_attention_bias.weight")
        self._bias = distance_bias(table, max_len, self.config.relative_attention_max_distance)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See :class:`~vllm_factory.models.backbone.Backbone`."""
        return self.shared(input_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, varlen: Varlen) -> list[torch.Tensor]:
        """See :class:`~vllm_factory.models.backbone.Backbone`. Positions are not used."""
        assert self._bias is not None, "prepare() has not run"
        return self.encoder(self.shared(input_ids), self._bias, varlen)


def _within_float16(hidden: torch.Tensor) -> torch.Tensor:
    """Keep float16 states finite.

    transformers clamps too, but to one of two bounds by whether *any* value of the batch has overflowed; here it
    is always the lower one, so that a request does not depend on its neighbours.
    """
    if hidden.dtype != torch.float16:
        return hidden
    bound = torch.finfo(torch.float16).max - 1000
    return hidden.clamp(-bound, bound)
