"""Backbone and head in one module, as the prepared checkpoint names them. Plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_factory.models.backbone import Network
from vllm_factory.models.deberta_v2 import DebertaModel
from vllm_factory.plugins.deberta_gliner2.config import DebertaGliner2Config
from vllm_factory.poolers.gliner2 import Gliner2Pooler


class DebertaGliner2Network(Network):
    """DeBERTa encoder and GLiNER2 head."""

    def __init__(self, config: DebertaGliner2Config) -> None:
        super().__init__()
        self.backbone = DebertaModel(config.encoder)
        self.head = Gliner2Pooler(config.head, config.encoder.hidden_size)

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> DebertaGliner2Network:
        """See :class:`~vllm_factory.models.backbone.Network`."""
        return cls(DebertaGliner2Config.from_factory(factory))
