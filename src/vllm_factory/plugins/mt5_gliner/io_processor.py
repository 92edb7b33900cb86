"""Entity recognition requests for GLiNER on T5 and mT5."""

from __future__ import annotations

from vllm_factory.io.gliner_processor import GlinerIOProcessor


class Mt5GlinerIOProcessor(GlinerIOProcessor):
    """``mt5_gliner_io``."""
