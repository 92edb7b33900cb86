"""Retrieval requests for ColQwen3."""

from __future__ import annotations

from vllm_factory.io.visual_processor import VisualIOProcessor
from vllm_factory.plugins.colqwen3.writer import ColQwen3Writer


class ColQwen3IOProcessor(VisualIOProcessor):
    """``colqwen3_io``."""

    writer_class = ColQwen3Writer
