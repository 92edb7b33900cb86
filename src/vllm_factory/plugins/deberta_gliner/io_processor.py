"""Entity recognition requests for GLiNER on DeBERTa."""

from __future__ import annotations

from vllm_factory.io.gliner_processor import GlinerIOProcessor


class DebertaGlinerIOProcessor(GlinerIOProcessor):
    """``deberta_gliner_io``."""
