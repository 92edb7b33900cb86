"""Backbone and head in one module, as the prepared checkpoint names them. Plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_factory.models.deberta_v2 import DebertaModel
from vllm_factory.models.gliner import GlinerNetwork
from vllm_factory.plugins.deberta_gliner.config import DebertaGlinerConfig
from vllm_factory.poolers.gliner import gliner_pooler


class DebertaGlinerNetwork(GlinerNetwork):
    """DeBERTa encoder, optional layer fusion, GLiNER head."""

    def __init__(self, config: DebertaGlinerConfig) -> None:
        backbone = DebertaModel(config.encoder)
        super().__init__(backbone, gliner_pooler(config.head, backbone.hidden_size))

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> DebertaGlinerNetwork:
        """See :class:`~vllm_factory.models.gliner.GlinerNetwork`."""
        return cls(DebertaGlinerConfig.from_factory(factory))
