"""The vLLM io processor of retrieval models that read texts and images."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from vllm.config import VllmConfig

from vllm_factory.io.limits import Limits
from vllm_factory.io.pipeline import Pipeline
from vllm_factory.io.processor import FactoryIOProcessor
from vllm_factory.io.visual import VisualPipeline, VisualWriter
from vllm_factory.published import Published


class _WriterClass(Protocol):
    def read(self, checkpoint: Published, max_tokens: int) -> VisualWriter: ...


class VisualIOProcessor(FactoryIOProcessor):
    """Runs a :class:`~vllm_factory.io.visual.VisualPipeline`; plugins give it their writer."""

    writer_class: ClassVar[_WriterClass]

    def build_pipeline(self, vllm_config: VllmConfig) -> Pipeline[Any, Any]:
        """See :class:`~vllm_factory.io.processor.FactoryIOProcessor`."""
        model = vllm_config.model_config
        checkpoint = Published.open(model.model, model.revision)
        writer = self.writer_class.read(checkpoint, model.max_model_len)
        return VisualPipeline(writer, Limits.from_environment())
