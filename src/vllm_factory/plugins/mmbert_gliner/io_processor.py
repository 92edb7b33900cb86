"""Entity recognition requests for GLiNER on ModernBERT and mmBERT."""

from __future__ import annotations

from vllm_factory.io.gliner_processor import GlinerIOProcessor


class MmbertGlinerIOProcessor(GlinerIOProcessor):
    """``mmbert_gliner_io``."""
