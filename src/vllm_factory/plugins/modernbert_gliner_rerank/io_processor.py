"""Reranking and entity recognition requests for GLiNER's token-level head on ModernBERT."""

from __future__ import annotations

from vllm_factory.io.gliner_processor import GlinerIOProcessor
from vllm_factory.io.rerank import RerankPipeline


class ModernBertGlinerRerankIOProcessor(GlinerIOProcessor):
    """``modernbert_gliner_rerank_io``."""

    pipeline_class = RerankPipeline
