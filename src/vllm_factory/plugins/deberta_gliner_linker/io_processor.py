"""Linking and entity recognition requests for GLiNER's bi-encoder."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from vllm_factory.io.limits import Limits
from vllm_factory.io.linker import LinkerPipeline
from vllm_factory.io.pipeline import Pipeline
from vllm_factory.io.processor import FactoryIOProcessor
from vllm_factory.io.tokens import LABELS_TOKENIZER, LabelTokenizer, WordTokenizer, tokenizer_file
from vllm_factory.poolers.gliner_config import GlinerConfig


class DebertaGlinerLinkerIOProcessor(FactoryIOProcessor):
    """``deberta_gliner_linker_io``."""

    def build_pipeline(self, vllm_config: VllmConfig) -> Pipeline[Any, Any]:
        """See :class:`~vllm_factory.io.processor.FactoryIOProcessor`."""
        model = vllm_config.model_config
        factory = model.hf_config.factory
        words = tokenizer_file(model.tokenizer, model.tokenizer_revision)
        labels = tokenizer_file(model.tokenizer, model.tokenizer_revision, LABELS_TOKENIZER)
        return LinkerPipeline(
            GlinerConfig.from_dict(factory["head"]),
            WordTokenizer(words),
            LabelTokenizer(labels, factory["labels"]["tokenizer_max_length"]),
            max_tokens=model.max_model_len,
            max_label_tokens=factory["labels"]["max_tokens"],
            tokenizer_max_length=factory["tokenizer_max_length"],
            limits=Limits.from_environment(),
        )
