"""How a model of ours learns the boundaries of the sequences in vLLM's flat batch.

vLLM builds attention metadata for every registered attention layer, with the metadata builder of that layer's
backend, and leaves it in the forward context. ``SequenceBoundaries`` is such a layer: it computes nothing, owns
no weights and no KV cache, and its backend's builder keeps just the host copy of the query lengths. So a
backbone with an attention of its own needs none of vLLM's kernels and no synchronisation with the device.
One such layer serves the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from vllm_factory.varlen import Varlen


@dataclass
class BoundaryMetadata(AttentionMetadata):  # type: ignore[misc]
    """Tokens of each request of the step, on the host. Zeros are padding."""

    lengths: list[int]


class BoundaryBuilder(AttentionMetadataBuilder[BoundaryMetadata]):  # type: ignore[misc]
    """Reads the query lengths off vLLM's common metadata. CUDA graphs of the whole step: never."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> BoundaryMetadata:
        # Model Runner V2 hands over a buffer that may be longer than the step has requests.
        starts = common_attn_metadata.query_start_loc_cpu[: common_attn_metadata.num_reqs + 1]
        return BoundaryMetadata((starts[1:] - starts[:-1]).tolist())


class BoundaryImpl(AttentionImpl):  # type: ignore[misc]
    """Stands where vLLM wants an implementation. It must never run."""

    def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("SequenceBoundaries computes no attention")


class BoundaryBackend(AttentionBackend):  # type: ignore[misc]
    """Backend of :class:`SequenceBoundaries`."""

    @staticmethod
    def get_name() -> str:
        # The name must be a member of vLLM's enumeration; this one is reserved for other packages.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return BoundaryImpl

    @staticmethod
    def get_builder_cls() -> type[BoundaryBuilder]:
        return BoundaryBuilder

    @staticmethod
    def get_kv_cache_shape(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        # Asked for by some versions although the layer has no cache.
        return (0,)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.ENCODER_ONLY)


class SequenceBoundaries(Attention):  # type: ignore[misc]
    """The layer; ask it with :meth:`varlen` inside a forward pass.

    Args:
        vllm_config: vLLM's configuration.
        prefix: Name of the layer.
        like: An encoder-only attention layer of the same model, if it has any: vLLM wants all to have one shape.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str, like: Any = None) -> None:
        super().__init__(
            num_heads=1 if like is None else like.num_kv_heads,
            # Some attention code of vLLM checks the head size of every layer; 64 is accepted everywhere.
            head_size=64 if like is None else like.head_size,
            scale=1.0,
            prefix=prefix,
            attn_type=AttentionType.ENCODER_ONLY,
            attn_backend=BoundaryBackend,
        )
        self.max_model_len = vllm_config.model_config.max_model_len

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        """No KV cache is allocated."""

    def varlen(self, num_tokens: int, device: torch.device) -> Varlen:
        """Boundaries of the ``num_tokens`` rows of this forward pass.

        Without metadata (profiling and warm-up) the rows count as sequences of the greatest length, so that
        the memory vLLM measures is the most a step can need.
        """
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, list):  # micro-batches
            metadata = metadata[0]
        if metadata is None or self.layer_name not in metadata:
            full, rest = divmod(num_tokens, self.max_model_len)
            return Varlen([self.max_model_len] * full + [rest] * bool(rest), device)
        return Varlen(metadata[self.layer_name].lengths, device)
