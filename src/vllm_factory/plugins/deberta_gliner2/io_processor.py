"""Extraction requests for GLiNER2 on DeBERTa."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from vllm_factory.io.gliner2 import Gliner2Pipeline
from vllm_factory.io.limits import Limits
from vllm_factory.io.pipeline import Pipeline
from vllm_factory.io.processor import FactoryIOProcessor
from vllm_factory.io.tokens import WordTokenizer, tokenizer_file
from vllm_factory.poolers.gliner2_config import Gliner2Config


class DebertaGliner2IOProcessor(FactoryIOProcessor):
    """``deberta_gliner2_io``."""

    def build_pipeline(self, vllm_config: VllmConfig) -> Pipeline[Any, Any]:
        """See :class:`~vllm_factory.io.processor.FactoryIOProcessor`."""
        model = vllm_config.model_config
        return Gliner2Pipeline(
            Gliner2Config.from_dict(model.hf_config.factory["head"]),
            WordTokenizer(tokenizer_file(model.tokenizer, model.tokenizer_revision)),
            max_tokens=model.max_model_len,
            limits=Limits.from_environment(),
        )
