"""The two configurations inside a prepared ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_factory.models.deberta_v2 import DebertaConfig
from vllm_factory.poolers.gliner2_config import Gliner2Config


class DebertaGliner2Config(NamedTuple):
    """Backbone and head of one checkpoint."""

    encoder: DebertaConfig
    head: Gliner2Config

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> DebertaGliner2Config:
        """From the ``factory`` part of a :class:`~vllm_factory.compat.hf.FactoryConfig`.

        Raises:
            CheckpointError: The configurations are incomplete or contradict themselves.
        """
        return cls(DebertaConfig.from_dict(factory["backbone"]), Gliner2Config.from_dict(factory["head"]))
