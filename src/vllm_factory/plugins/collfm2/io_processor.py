"""Retrieval requests for ColLFM2."""

from __future__ import annotations

from vllm_factory.io.visual_processor import VisualIOProcessor
from vllm_factory.plugins.collfm2.writer import ColLfm2Writer


class ColLfm2IOProcessor(VisualIOProcessor):
    """``collfm2_io``."""

    writer_class = ColLfm2Writer
