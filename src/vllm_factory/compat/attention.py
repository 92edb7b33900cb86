"""How a model of ours learns the boundaries of the sequences in vLLM's flat batch.

vLLM builds attention metadata for every registered attention layer, with the metadata builder of that layer's
backend, and leaves it in the forward context. ``SequenceBoundaries`` is such a layer: it computes nothing, owns
no weights and no KV cache, and its backend's builder keeps just the host copy of the query lengths. So a
backbone with an attention of its own needs none of vLLM's kernels and no synchronisation with the device.
One such layer serves the whole model.

A model with attention layers of vLLM's asks one of those instead, with :func:`note_boundaries` and
:func:`noted_boundaries`: vLLM wants all layers without a cache to have one shape, and beside convolutions that keep
states (seen with 0.26 on GPUs) it takes no layer without a cache at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
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

    sequence_lengths: list[int]


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
        return BoundaryMetadata(_lengths(common_attn_metadata))


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
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(
            num_heads=1,
            # Some attention code of vLLM checks the head size of every layer; 64 is accepted everywhere.
            head_size=64,
            scale=1.0,
            prefix=prefix,
            attn_type=AttentionType.ENCODER_ONLY,
            attn_backend=BoundaryBackend,
        )
        self.max_model_len = vllm_config.model_config.max_model_len

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        """No KV cache is allocated."""

    def varlen(self, num_tokens: int, device: torch.device) -> Varlen:
        """Boundaries of the ``num_tokens`` rows of this forward pass: see :func:`noted_boundaries`."""
        return noted_boundaries(self, num_tokens, self.max_model_len, device)


def note_boundaries(layers: Sequence[Any], *, alone: bool = False) -> None:
    """Let vLLM's attention layers note the lengths of the step's sequences beside what they note for themselves.

    Args:
        layers: All attention layers of the model, so that they stay in one group.
        alone: They note nothing else, and cannot be run.
    """
    for layer in layers:
        layer.attn_backend = _noting(layer.attn_backend, alone)


def noted_boundaries(layer: Any, num_tokens: int, max_model_len: int, device: torch.device) -> Varlen:
    """Boundaries of the ``num_tokens`` rows of this forward pass, as a layer's builder noted them.

    Without metadata (profiling and warm-up) the rows count as sequences of the greatest length, so that
    the memory vLLM measures is the most a step can need.

    Args:
        layer: A :class:`SequenceBoundaries`, or a layer that :func:`note_boundaries` was given.
        num_tokens: Rows of the forward pass.
        max_model_len: The greatest length.
        device: Where the boundaries are wanted.
    """
    metadata = _metadata(layer.layer_name)
    lengths = None if metadata is None else metadata.sequence_lengths
    return _varlen(lengths, num_tokens, max_model_len, device)


@cache
def _noting(backend: Any, alone: bool) -> Any:
    """A backend like this one, but for the lengths in its metadata. One class each: by it vLLM groups layers."""
    builder = BoundaryBuilder if alone else _noting_builder(backend.get_builder_cls())
    return type(f"Noting{backend.__name__}", (backend,), {"get_builder_cls": staticmethod(lambda: builder)})


def _noting_builder(parent: Any) -> Any:
    class NotingBuilder(parent):  # type: ignore[misc]
        # A graph of the whole step would replay the lengths that it was captured with.
        _cudagraph_support = AttentionCGSupport.NEVER

        @classmethod
        def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
            return AttentionCGSupport.NEVER

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.sequence_lengths = _lengths(common_attn_metadata)
            return metadata

        def update_block_table(self, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            updated = super().update_block_table(metadata, *args, **kwargs)
            updated.sequence_lengths = metadata.sequence_lengths
            return updated

    return NotingBuilder


def _lengths(common: CommonAttentionMetadata) -> list[int]:
    """Tokens of each request of the step, on the host."""
    # Model Runner V2 hands over a buffer that may be longer than the step has requests.
    starts = common.query_start_loc_cpu[: common.num_reqs + 1]
    lengths: list[int] = (starts[1:] - starts[:-1]).tolist()
    return lengths


def _metadata(layer_name: str) -> Any:
    """What a layer's builder made for this forward pass; ``None`` in profiling and warm-up."""
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):  # micro-batches
        metadata = metadata[0]
    return None if metadata is None else metadata.get(layer_name)


def _varlen(lengths: list[int] | None, num_tokens: int, max_model_len: int, device: torch.device) -> Varlen:
    if lengths is None:
        full, rest = divmod(num_tokens, max_model_len)
        lengths = [max_model_len] * full + [rest] * bool(rest)
    return Varlen(lengths, device)
