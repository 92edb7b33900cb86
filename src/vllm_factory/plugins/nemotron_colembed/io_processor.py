"""Retrieval requests for Nemotron ColEmbed."""

from __future__ import annotations

from vllm_factory.io.visual_processor import VisualIOProcessor
from vllm_factory.plugins.nemotron_colembed.writer import NemotronWriter


class NemotronColEmbedIOProcessor(VisualIOProcessor):
    """``nemotron_colembed_io``."""

    writer_class = NemotronWriter
