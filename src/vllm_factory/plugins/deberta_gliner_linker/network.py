"""Text encoder and head, the label encoder inside it, as the prepared checkpoint names them. Plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_factory.models.deberta_v2 import DebertaModel
from vllm_factory.models.gliner import GlinerNetwork
from vllm_factory.plugins.deberta_gliner_linker.config import DebertaGlinerLinkerConfig
from vllm_factory.poolers.gliner_bi import bi_encoder_pooler
from vllm_factory.poolers.label_cache import cache_bytes


class DebertaGlinerLinkerNetwork(GlinerNetwork):
    """DeBERTa for texts, another for labels, optional layer fusion in both, GLiNER head."""

    def __init__(self, config: DebertaGlinerLinkerConfig) -> None:
        backbone = DebertaModel(config.encoder)
        head = bi_encoder_pooler(
            config.head,
            backbone.hidden_size,
            DebertaModel(config.labels),
            vocabulary=config.labels.vocab_size,
            max_tokens=config.labels_max_tokens,
            cache_bytes=cache_bytes(),
        )
        super().__init__(backbone, head)

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> DebertaGlinerLinkerNetwork:
        """See :class:`~vllm_factory.models.gliner.GlinerNetwork`."""
        return cls(DebertaGlinerLinkerConfig.from_factory(factory))
