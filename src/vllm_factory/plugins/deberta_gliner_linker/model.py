"""GLiNER's bi-encoder on two DeBERTa encoders as a vLLM pooling model."""

from __future__ import annotations

from vllm_factory.compat.vllm_api import encoder_only
from vllm_factory.plugins.deberta_gliner_linker.network import DebertaGlinerLinkerNetwork
from vllm_factory.pooling.vllm_model import NetworkModel


@encoder_only
class DebertaGlinerLinkerModel(NetworkModel):
    """See :class:`~vllm_factory.pooling.vllm_model.NetworkModel`."""

    network_class = DebertaGlinerLinkerNetwork
