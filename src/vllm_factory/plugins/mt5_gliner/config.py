"""The two configurations inside a prepared ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_factory.models.t5_encoder import T5EncoderConfig
from vllm_factory.poolers.gliner_config import GlinerConfig


class Mt5GlinerConfig(NamedTuple):
    """Backbone and head of one checkpoint."""

    encoder: T5EncoderConfig
    head: GlinerConfig

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> Mt5GlinerConfig:
        """From the ``factory`` part of a :class:`~vllm_factory.compat.hf.FactoryConfig`.

        Raises:
            CheckpointError: The configurations are incomplete or contradict themselves.
        """
        return cls(T5EncoderConfig.from_dict(factory["backbone"]), GlinerConfig.from_dict(factory["head"]))
