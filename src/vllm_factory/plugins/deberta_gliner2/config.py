"""The two configurations inside a prepared ``config.json``."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm_factory.models.deberta_v2 import DebertaConfig
from vllm_factory.poolers.gliner2_config import Gliner2Config


class DebertaGliner2Config(NamedTuple):
    """Backbone and head of one checkpoint."""

    encoder: DebertaConfig
    head: Gliner2Config

    @classmethod
    def from_hf(cls, hf_config: Any) -> DebertaGliner2Config:
        """From the :class:`~vllm_factory.compat.hf.FactoryConfig` that vLLM loaded.

        Raises:
            CheckpointError: The configurations are incomplete or contradict themselves.
        """
        factory = hf_config.factory
        return cls(DebertaConfig.from_dict(factory["backbone"]), Gliner2Config.from_dict(factory["head"]))
