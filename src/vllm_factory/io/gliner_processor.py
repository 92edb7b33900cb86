"""The vLLM io processor of every GLiNER with one encoder."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.config import VllmConfig

from vllm_factory.io.gliner import GlinerPipeline
from vllm_factory.io.limits import Limits
from vllm_factory.io.pipeline import Pipeline
from vllm_factory.io.processor import FactoryIOProcessor
from vllm_factory.io.tokens import WordTokenizer, tokenizer_file
from vllm_factory.poolers.gliner_config import GlinerConfig


class GlinerIOProcessor(FactoryIOProcessor):
    """Runs a :class:`~vllm_factory.io.gliner.GlinerPipeline`; plugins give it a name, or another kind."""

    pipeline_class: ClassVar[type[GlinerPipeline]] = GlinerPipeline

    def build_pipeline(self, vllm_config: VllmConfig) -> Pipeline[Any, Any]:
        """See :class:`~vllm_factory.io.processor.FactoryIOProcessor`."""
        model = vllm_config.model_config
        factory = model.hf_config.factory
        head = GlinerConfig.from_dict(factory["head"])
        tokenizer = tokenizer_file(model.tokenizer, model.tokenizer_revision)
        return self.pipeline_class(
            head,
            WordTokenizer(tokenizer, known=head.ent_token),
            max_tokens=model.max_model_len,
            tokenizer_max_length=factory["tokenizer_max_length"],
            limits=Limits.from_environment(),
        )
