"""Backbone and head in one module, as the prepared checkpoint names them. Plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_factory.models.gliner import GlinerNetwork
from vllm_factory.models.t5_encoder import T5Encoder
from vllm_factory.plugins.mt5_gliner.config import Mt5GlinerConfig
from vllm_factory.poolers.gliner import gliner_pooler


class Mt5GlinerNetwork(GlinerNetwork):
    """T5 or mT5 encoder, optional layer fusion, GLiNER head."""

    def __init__(self, config: Mt5GlinerConfig) -> None:
        backbone = T5Encoder(config.encoder)
        super().__init__(backbone, gliner_pooler(config.head, backbone.hidden_size))

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> Mt5GlinerNetwork:
        """See :class:`~vllm_factory.models.gliner.GlinerNetwork`."""
        return cls(Mt5GlinerConfig.from_factory(factory))
