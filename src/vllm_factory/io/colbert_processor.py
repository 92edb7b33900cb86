"""The vLLM io processor of every ColBERT that PyLate has saved."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from vllm_factory.io.colbert import ColbertPipeline
from vllm_factory.io.limits import Limits
from vllm_factory.io.pipeline import Pipeline
from vllm_factory.io.processor import FactoryIOProcessor


class ColbertIOProcessor(FactoryIOProcessor):
    """Runs a :class:`~vllm_factory.io.colbert.ColbertPipeline`; plugins give it their name."""

    def build_pipeline(self, vllm_config: VllmConfig) -> Pipeline[Any, Any]:
        """See :class:`~vllm_factory.io.processor.FactoryIOProcessor`."""
        model = vllm_config.model_config
        return ColbertPipeline.read(model.model, model.revision, model.max_model_len, Limits.from_environment())
