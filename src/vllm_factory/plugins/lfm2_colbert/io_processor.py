"""Retrieval requests for ColBERT on LFM2."""

from __future__ import annotations

from vllm_factory.io.colbert_processor import ColbertIOProcessor


class Lfm2ColbertIOProcessor(ColbertIOProcessor):
    """``lfm2_colbert_io``."""
