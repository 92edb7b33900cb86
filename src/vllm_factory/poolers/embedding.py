"""One vector a text: the pooling, dense and normalising modules of sentence-transformers. No vLLM import.

The blob of a request holds one array, ``int32 [3]``: the number of dimensions to keep (0 for all), how many tokens
the prompt was sent with, and how many tokens at the beginning are left out of the pooling (a prompt that the
checkpoint does not want in it). A result holds ``int32 shape`` and ``float32 data``, as
:mod:`vllm_factory.poolers.multivector` has them.

Shape legend: T tokens, B requests, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vllm_factory.errors import CheckpointError, TransportError
from vllm_factory.poolers.dense_stack import DenseStack, dense_stack
from vllm_factory.poolers.ragged import upload
from vllm_factory.pooling.protocol import PoolerResult, Status
from vllm_factory.published import Published


class Segments(NamedTuple):
    """Rows that are pooled, flat, and whose they are.

    Attributes:
        states: ``[T, H]`` float32.
        owner: ``[T]`` int64, the request of each row.
        places: ``[T]`` int64, the place of each row in its whole prompt, from 1.
        counts: ``[B]`` int64, pooled rows.
        first: ``[B, H]`` float32, each prompt's first row, whether it is pooled or not.
    """

    states: torch.Tensor
    owner: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor
    first: torch.Tensor

    def sums(self, states: torch.Tensor) -> torch.Tensor:
        """``[T, ...]`` to ``[B, ...]``."""
        zeros = states.new_zeros(self.counts.shape[0], *states.shape[1:])
        return zeros.index_add(0, self.owner, states)

    def ends(self) -> torch.Tensor:
        """``[B]``, behind each request's last row."""
        return self.counts.cumsum(0)


def _mean(segments: Segments) -> torch.Tensor:
    return segments.sums(segments.states) / segments.counts[:, None]


def _mean_sqrt_length(segments: Segments) -> torch.Tensor:
    return segments.sums(segments.states) / segments.counts[:, None].sqrt()


def _weighted_mean(segments: Segments) -> torch.Tensor:
    # A prompt that is left out counts in the places all the same: as in the library.
    weights = segments.places.float().unsqueeze(-1)
    return segments.sums(segments.states * weights) / segments.sums(weights)


def _max(segments: Segments) -> torch.Tensor:
    index = segments.owner[:, None].expand_as(segments.states)
    lowest = segments.states.new_full((segments.counts.shape[0], segments.states.shape[1]), -torch.inf)
    return lowest.scatter_reduce(0, index, segments.states, "amax")


def _first(segments: Segments) -> torch.Tensor:
    # The first token itself, even of a prompt that is left out of other poolings: as in the library.
    return segments.first


def _last(segments: Segments) -> torch.Tensor:
    return segments.states[segments.ends() - 1]


#: By the key of ``1_Pooling/config.json`` that turns it on; several are joined in this order.
POOLINGS: dict[str, Callable[[Segments], torch.Tensor]] = {
    "pooling_mode_cls_token": _first,
    "pooling_mode_max_tokens": _max,
    "pooling_mode_mean_tokens": _mean,
    "pooling_mode_mean_sqrt_len_tokens": _mean_sqrt_length,
    "pooling_mode_weightedmean_tokens": _weighted_mean,
    "pooling_mode_lasttoken": _last,
}
#: What newer versions of the library write instead, under ``pooling_mode``.
_NAMES = dict(
    zip(("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"), POOLINGS, strict=True)
)


class PoolingConfig(NamedTuple):
    """Which poolings are joined, and whether a prompt's tokens take part."""

    modes: tuple[str, ...]
    include_prompt: bool

    @classmethod
    def read(cls, checkpoint: Published) -> PoolingConfig:
        """From the checkpoint's pooling module.

        Raises:
            CheckpointError: There is not exactly one, or it asks for a pooling that is not known.
        """
        folders = [module.folder for module in checkpoint.modules() if module.kind == "Pooling"]
        if len(folders) != 1:
            raise CheckpointError(f"{checkpoint.name}: {len(folders)} pooling modules; expected one")
        values = checkpoint.table(f"{folders[0]}/config.json")
        named = values.get("pooling_mode")
        if named is None:
            modes = [key for key, wanted in values.items() if key.startswith("pooling_mode_") and wanted]
        else:
            modes = [_NAMES.get(str(name), str(name)) for name in ([named] if isinstance(named, str) else named)]
        unknown = sorted(set(modes) - POOLINGS.keys())
        if unknown or not modes:
            raise CheckpointError(
                f"{checkpoint.name}: {folders[0]}: unknown pooling {', '.join(unknown) or 'none'}"
            )
        ordered = tuple(mode for mode in POOLINGS if mode in modes)
        return cls(ordered, bool(values.get("include_prompt", True)))


class EmbeddingRequest(NamedTuple):
    """A checked blob: dimensions to keep (0 for all), and the prompt's length and first pooled token."""

    dimensions: int
    skip: int
    num_tokens: int


class EmbeddingPooler(nn.Module):
    """Pooling, dense modules, normalisation, and fewer dimensions where a request wants them.

    Fewer dimensions are the first ones: ``encode(truncate_dim=...)`` of the library, with
    ``normalize_embeddings=True`` where the checkpoint normalises at all.

    Args:
        modes: Keys of :data:`POOLINGS`.
        head: ``[B, len(modes) * hidden size]`` to ``[B, D]`` float32.
        out_features: D.
        normalize: Whether vectors get length one.
    """

    task = "embed"
    blob_kind = 4

    def __init__(self, modes: Sequence[str], head: nn.Module, out_features: int, *, normalize: bool) -> None:
        super().__init__()
        self.modes = tuple(modes)
        self.head = head
        self.out_features = out_features
        self.normalize = normalize

    def parse(self, arrays: Sequence[np.ndarray], num_tokens: int) -> EmbeddingRequest:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        if [a.dtype.str for a in arrays] != ["<i4"] or arrays[0].size != 3:
            raise TransportError(f"arrays of dtype {[str(a.dtype) for a in arrays]}; expected int32 [3]")
        dimensions, sent, skip = arrays[0].tolist()
        if sent != num_tokens:
            raise TransportError(f"a prompt of {sent} tokens arrived with {num_tokens}")
        if not 0 <= dimensions <= self.out_features or not 0 <= skip < num_tokens:
            raise TransportError(
                f"{dimensions} dimensions of {self.out_features}, {skip} tokens of {num_tokens} left out"
            )
        return EmbeddingRequest(dimensions, skip, num_tokens)

    def pool(
        self, hidden_states: torch.Tensor, starts: Sequence[int], requests: Sequence[EmbeddingRequest]
    ) -> list[PoolerResult]:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        segments = _segments(hidden_states, np.array(starts), requests)
        pooled = torch.cat([POOLINGS[mode](segments) for mode in self.modes], dim=-1)
        vectors = self._normalised(self.head(pooled).float())
        kept = [request.dimensions or self.out_features for request in requests]
        if min(kept) < self.out_features:
            device = hidden_states.device
            mask = torch.arange(self.out_features, device=device) < upload(np.array(kept), device)[:, None]
            # Zeros do not change a length, so the rest may stay until the transfer is done.
            vectors = self._normalised(vectors * mask)
        return [_result(row[:size]) for row, size in zip(vectors.cpu().numpy(), kept, strict=True)]

    def _normalised(self, vectors: torch.Tensor) -> torch.Tensor:
        return F.normalize(vectors, p=2, dim=-1) if self.normalize else vectors


def _segments(hidden_states: torch.Tensor, starts: np.ndarray, requests: Sequence[EmbeddingRequest]) -> Segments:
    """The rows of all requests, picked and turned into float32."""
    device = hidden_states.device
    places = [np.arange(request.skip, request.num_tokens) for request in requests]
    counts = np.array([each.size for each in places])
    owner = np.repeat(np.arange(len(requests)), counts)
    place = np.concatenate(places)
    return Segments(
        states=hidden_states[upload(place + starts[owner], device)].float(),
        owner=upload(owner, device),
        places=upload(place + 1, device),
        counts=upload(counts, device),
        first=hidden_states[upload(starts, device)].float(),
    )


def embedding_pooler(checkpoint: Published, hidden_size: int) -> tuple[EmbeddingPooler, DenseStack]:
    """The pooler that a checkpoint's modules describe, and its dense modules, which still need their weights.

    Raises:
        CheckpointError: Its modules are others than a Transformer, a Pooling, any Dense, and maybe Normalize.
    """
    kinds = [module.kind for module in checkpoint.modules()]
    normalize = kinds[-1] == "Normalize"
    middle = kinds[2 : -1 if normalize else None]
    if kinds[:2] != ["Transformer", "Pooling"] or set(middle) - {"Dense"}:
        raise CheckpointError(
            f"{checkpoint.name}: modules {', '.join(kinds)}; expected Transformer, Pooling, Dense ones, Normalize"
        )
    modes = PoolingConfig.read(checkpoint).modes
    head = dense_stack(checkpoint, len(modes) * hidden_size)
    return EmbeddingPooler(modes, head, head.out_features, normalize=normalize), head


def _result(vector: np.ndarray) -> PoolerResult:
    if not np.isfinite(vector).all():
        return PoolerResult(Status.NOT_FINITE)
    return PoolerResult(Status.OK, (np.array(vector.shape, np.int32), np.ascontiguousarray(vector)))
