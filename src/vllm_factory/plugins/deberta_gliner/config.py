"""The two configurations inside a prepared ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_factory.models.deberta_v2 import DebertaConfig
from vllm_factory.poolers.gliner_config import GlinerConfig


class DebertaGlinerConfig(NamedTuple):
    """Backbone and head of one checkpoint."""

    encoder: DebertaConfig
    head: GlinerConfig

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> DebertaGlinerConfig:
        """From the ``factory`` part of a :class:`~vllm_factory.compat.hf.FactoryConfig`.

        Raises:
            CheckpointError: The configurations are incomplete or contradict themselves.
        """
        return cls(DebertaConfig.from_dict(factory["backbone"]), GlinerConfig.from_dict(factory["head"]))
