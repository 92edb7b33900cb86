"""GLiNER on DeBERTa as a vLLM pooling model."""

from __future__ import annotations

from vllm_factory.compat.vllm_api import encoder_only
from vllm_factory.plugins.deberta_gliner.network import DebertaGlinerNetwork
from vllm_factory.pooling.vllm_model import NetworkModel


@encoder_only
class DebertaGlinerModel(NetworkModel):
    """See :class:`~vllm_factory.pooling.vllm_model.NetworkModel`."""

    network_class = DebertaGlinerNetwork
