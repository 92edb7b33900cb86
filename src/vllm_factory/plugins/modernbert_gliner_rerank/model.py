"""GLiNER's token-level head on vLLM's own ModernBERT as a vLLM pooling model."""

from __future__ import annotations

from vllm_factory.compat.vllm_api import encoder_only
from vllm_factory.plugins.mmbert_gliner.model import MmbertGlinerModel


@encoder_only
class ModernBertGlinerRerankModel(MmbertGlinerModel):
    """The network of ``mmbert_gliner``; what differs is how requests use it."""
