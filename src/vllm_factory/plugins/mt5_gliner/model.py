"""GLiNER on T5 and mT5 as a vLLM pooling model."""

from __future__ import annotations

from vllm_factory.compat.vllm_api import encoder_only
from vllm_factory.plugins.mt5_gliner.network import Mt5GlinerNetwork
from vllm_factory.pooling.vllm_model import NetworkModel


@encoder_only
class Mt5GlinerModel(NetworkModel):
    """See :class:`~vllm_factory.pooling.vllm_model.NetworkModel`."""

    network_class = Mt5GlinerNetwork
