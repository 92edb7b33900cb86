"""Heads of a bi-encoder GLiNER: labels come as tokens beside the text and are encoded here, in the engine.

As in :mod:`vllm_factory.poolers.gliner`, except that a blob holds the labels' own tokens, for the label encoder:

0. ``float32 [1]`` threshold;
1. ``int32 [C + 1]`` where each label's tokens begin, and the last one's end;
2. ``int32`` tokens of all labels, special ones included;
3. ``int32`` words;
4. optionally ``int32``, a selection.

Labels that several requests of a step share are looked up or encoded once. The library builds an LSTM for these
models and never runs it (gliner 0.2.29, ``BaseBiEncoderModel``); neither do we.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from vllm_factory.errors import TransportError
from vllm_factory.models.backbone import Backbone
from vllm_factory.models.label_encoder import LabelEncoder
from vllm_factory.poolers.gliner import (
    ROW_BUDGET,
    GlinerPooler,
    GlinerRequest,
    GlinerSpanPooler,
    GlinerTokenPooler,
    check_kinds,
)
from vllm_factory.poolers.gliner_config import GlinerConfig
from vllm_factory.poolers.label_cache import LabelCache
from vllm_factory.poolers.ragged import gather_rows, upload

#: Tokens that one label may have.
MAX_LABEL_TOKENS = 512
#: Tokens of labels that are encoded at once.
TOKEN_BUDGET = 2**14


@dataclass(frozen=True, slots=True)
class BiRequest(GlinerRequest):
    """A checked blob; ``labels`` are the labels' tokens, ``bounds`` where each label's begin and the last ends."""

    bounds: np.ndarray = field(kw_only=True)

    def contents(self) -> list[bytes]:
        """What identifies each label's content."""
        data, size = self.labels.tobytes(), self.labels.itemsize
        edges = (self.bounds * size).tolist()
        return [data[a:b] for a, b in pairwise(edges)]


class BiEncoderPooler(GlinerPooler):
    """What the heads of bi-encoders share; mixed in before a head.

    Args:
        config: The head's configuration.
        encoder_size: Width of the text encoder's states.
        labels_backbone: The label encoder.
        vocabulary: Tokens that it knows.
        max_tokens: Tokens of one label.
        cache_bytes: Bound on the label vectors that are kept.
    """

    blob_kind = 5

    def __init__(
        self,
        config: GlinerConfig,
        encoder_size: int,
        labels_backbone: Backbone,
        *,
        vocabulary: int,
        max_tokens: int,
        cache_bytes: int,
    ) -> None:
        super().__init__(config, encoder_size)
        self.labels_encoder = LabelEncoder(labels_backbone, config.hidden_size, fuse_layers=config.fuse_layers)
        self.vocabulary, self.max_tokens = vocabulary, max_tokens
        self.label_cache = LabelCache(config.hidden_size, cache_bytes)

    def prepare(self) -> None:
        """Compute what depends on weights alone. Call once, after loading, on the final device."""
        self.labels_encoder.prepare(self.max_tokens)

    def padded_rows(self, request: GlinerRequest) -> int:
        return max(request.num_words, request.num_labels)

    def parse(self, arrays: Sequence[np.ndarray], num_tokens: int) -> BiRequest:
        """See :class:`~vllm_factory.pooling.protocol.FactoryPooler`."""
        check_kinds(arrays, "fiii", "fiiii")
        threshold, bounds, tokens, words = arrays[:4]
        bounds, tokens = bounds.astype(np.int64), tokens.astype(np.int32)
        lengths = np.diff(bounds)
        if lengths.size < 1 or bounds[0] or bounds[-1] != tokens.size:
            raise TransportError(f"{lengths.size} labels of {tokens.size} tokens")
        if lengths.min() < 1 or lengths.max() > self.max_tokens:
            raise TransportError(f"a label of {lengths.min()} or {lengths.max()} tokens")
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise TransportError(f"a token outside the label encoder's vocabulary of {self.vocabulary}")
        base = self._request(threshold, tokens, lengths.size, words, arrays[4:], num_tokens)
        return BiRequest(
            base.threshold,
            base.labels,
            base.words,
            base.num_words,
            base.num_labels,
            base.selection,
            bounds=bounds,
        )

    def _labels(self, states: torch.Tensor, starts: list[int], requests: list[GlinerRequest]) -> torch.Tensor:
        places: dict[bytes, int] = {}
        rows: dict[tuple[bytes, bytes], np.ndarray] = {}
        index = []
        for request in requests:
            assert isinstance(request, BiRequest)
            # The same knowledge base in many requests of a step is read once.
            content = (request.bounds.tobytes(), request.labels.tobytes())
            if content not in rows:
                rows[content] = np.array(
                    [places.setdefault(key, len(places)) for key in request.contents()], np.int64
                )
            index.append(rows[content])
        keys = list(places)
        vectors = self.label_cache.lookup(keys, lambda missing: self._encode([keys[i] for i in missing], states))
        return gather_rows(self.features(vectors), index)

    def features(self, vectors: torch.Tensor) -> torch.Tensor:
        """What the head does to each label, whatever the text: ``[N, D]`` to the same."""
        return vectors

    def _encode(self, labels: Sequence[bytes], states: torch.Tensor) -> torch.Tensor:
        """``[len(labels), D]``, in the order given. Labels of similar length go together."""
        tokens = [np.frombuffer(label, np.int32) for label in labels]
        order = sorted(range(len(tokens)), key=lambda i: tokens[i].size)
        vectors, first, size = [], 0, 0
        for last, place in enumerate(order):
            if size and size + tokens[place].size > TOKEN_BUDGET:
                vectors.append(self._encode_flat([tokens[i] for i in order[first:last]], states))
                first, size = last, 0
            size += tokens[place].size
        vectors.append(self._encode_flat([tokens[i] for i in order[first:]], states))
        inverse = np.empty(len(order), np.int64)
        inverse[order] = np.arange(len(order))
        return torch.cat(vectors)[upload(inverse, states.device)]

    def _encode_flat(self, labels: list[np.ndarray], states: torch.Tensor) -> torch.Tensor:
        flat = upload(np.concatenate(labels).astype(np.int64), states.device)
        return self.labels_encoder(flat, [label.size for label in labels]).to(states.dtype)


class BiEncoderSpanPooler(BiEncoderPooler, GlinerSpanPooler):
    """Scores every span of up to ``max_width`` words against every label."""

    def features(self, vectors: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.prompt_rep_layer(part) for part in torch.split(vectors, ROW_BUDGET)])

    def label_features(self, labels: torch.Tensor) -> torch.Tensor:
        return labels  # done once for each label of the step


class BiEncoderTokenPooler(BiEncoderPooler, GlinerTokenPooler):
    """Scores words, and joins a start and an end of one label."""


def bi_encoder_pooler(config: GlinerConfig, *args: Any, **kwargs: Any) -> BiEncoderPooler:
    """The head that a configuration asks for; arguments as :class:`BiEncoderPooler` has them."""
    head = BiEncoderTokenPooler if config.token_level else BiEncoderSpanPooler
    return head(config, *args, **kwargs)
