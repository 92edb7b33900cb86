"""GLiNER2 on DeBERTa as a vLLM pooling model."""

from __future__ import annotations

from vllm_factory.compat.vllm_api import encoder_only
from vllm_factory.plugins.deberta_gliner2.network import DebertaGliner2Network
from vllm_factory.pooling.vllm_model import NetworkModel


@encoder_only
class DebertaGliner2Model(NetworkModel):
    """See :class:`~vllm_factory.pooling.vllm_model.NetworkModel`."""

    network_class = DebertaGliner2Network
