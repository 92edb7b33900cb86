"""Turns a GLiNER with a token-level head on ModernBERT into a directory that vLLM serves."""

from __future__ import annotations

from pathlib import Path

from vllm_factory.plugins.mmbert_gliner.prep import ModernBertPrep
from vllm_factory.prep.gliner import prepare_gliner
from vllm_factory.prep.source import Source
from vllm_factory.registry import plugin


class RerankPrep(ModernBertPrep):
    """See :class:`~vllm_factory.prep.gliner.EncoderPrep`."""

    spec = plugin("modernbert_gliner_rerank")


def prepare(source: Source, output: Path) -> dict[str, str]:
    """See :func:`~vllm_factory.prep.gliner.prepare_gliner`."""
    return prepare_gliner(source, output, RerankPrep())
