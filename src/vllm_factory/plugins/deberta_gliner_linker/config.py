"""The three configurations inside a prepared ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_factory.models.deberta_v2 import DebertaConfig
from vllm_factory.poolers.gliner_config import GlinerConfig


class DebertaGlinerLinkerConfig(NamedTuple):
    """Text encoder, label encoder and head of one checkpoint.

    Attributes:
        encoder: The encoder of texts.
        labels: The encoder of labels.
        labels_max_tokens: Tokens of one label.
        head: The scorer.
    """

    encoder: DebertaConfig
    labels: DebertaConfig
    labels_max_tokens: int
    head: GlinerConfig

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> DebertaGlinerLinkerConfig:
        """From the ``factory`` part of a :class:`~vllm_factory.compat.hf.FactoryConfig`.

        Raises:
            CheckpointError: The configurations are incomplete or contradict themselves.
        """
        labels = factory["labels"]
        return cls(
            DebertaConfig.from_dict(factory["backbone"]),
            DebertaConfig.from_dict(labels["backbone"]),
            labels["max_tokens"],
            GlinerConfig.from_dict(factory["head"]),
        )
