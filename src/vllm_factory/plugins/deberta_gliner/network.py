"""Backbone and head in one module, as the prepared checkpoint names them. Plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_factory.models.deberta_v2 import DebertaModel
from vllm_factory.models.gliner import GlinerNetwork
from vllm_factory.plugins.deberta_gliner.config import DebertaGlinerConfig


class DebertaGlinerNetwork(GlinerNetwork):
    """DeBERTa encoder, optional layer fusion, GLiNER head."""

    def __init__(self, config: DebertaGlinerConfig) -> None:
        super().__init__(DebertaModel(config.encoder), config.head)

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> DebertaGlinerNetwork:
        """See :class:`~vllm_factory.models.gliner.GlinerNetwork`."""
        return cls(DebertaGlinerConfig.from_factory(factory))
