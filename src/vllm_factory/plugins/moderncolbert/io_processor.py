"""Retrieval requests for ColBERT on ModernBERT."""

from __future__ import annotations

from vllm_factory.io.colbert_processor import ColbertIOProcessor


class ModernColbertIOProcessor(ColbertIOProcessor):
    """``moderncolbert_io``."""
