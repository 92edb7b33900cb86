"""Embedding requests for EmbeddingGemma."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from vllm_factory.io.dense import DensePipeline
from vllm_factory.io.limits import Limits
from vllm_factory.io.pipeline import Pipeline
from vllm_factory.io.processor import FactoryIOProcessor


class EmbeddingGemmaIOProcessor(FactoryIOProcessor):
    """``embeddinggemma_io``."""

    def build_pipeline(self, vllm_config: VllmConfig) -> Pipeline[Any, Any]:
        """See :class:`~vllm_factory.io.processor.FactoryIOProcessor`."""
        model = vllm_config.model_config
        return DensePipeline.read(
            model.model,
            model.revision,
            model.hf_config.hidden_size,
            model.max_model_len,
            Limits.from_environment(),
        )
