"""Backbone and head in one module, as the prepared checkpoint names them. Plain torch."""

from __future__ import annotations

import torch
from torch import nn

from vllm_factory.models.deberta_v2 import DebertaModel
from vllm_factory.plugins.deberta_gliner2.config import DebertaGliner2Config
from vllm_factory.poolers.gliner2 import Gliner2Pooler
from vllm_factory.varlen import Varlen


class DebertaGliner2Network(nn.Module):
    """DeBERTa encoder and GLiNER2 head."""

    def __init__(self, config: DebertaGliner2Config) -> None:
        super().__init__()
        self.backbone = DebertaModel(config.encoder)
        self.head = Gliner2Pooler(config.head, config.encoder.hidden_size)

    def prepare(self, max_len: int) -> None:
        """Compute what depends on weights alone. Call once, after loading, on the final device."""
        self.backbone.prepare(max_len)

    def encode(self, input_ids: torch.Tensor, positions: torch.Tensor, varlen: Varlen) -> torch.Tensor:
        """``[T]`` token ids and positions to ``[T, encoder hidden size]``."""
        return self.backbone(input_ids, positions, varlen)[-1]
