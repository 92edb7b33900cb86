"""The two configurations inside a prepared ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import ModernBertConfig

from vllm_factory.poolers.gliner_config import GlinerConfig


class MmbertGlinerConfig(NamedTuple):
    """Backbone and head of one checkpoint."""

    encoder: ModernBertConfig
    head: GlinerConfig

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> MmbertGlinerConfig:
        """From the ``factory`` part of a :class:`~vllm_factory.compat.hf.FactoryConfig`.

        Raises:
            CheckpointError: The head's configuration contradicts itself.
        """
        return cls(ModernBertConfig(**factory["backbone"]), GlinerConfig.from_dict(factory["head"]))
