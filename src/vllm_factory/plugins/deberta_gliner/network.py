"""Backbone and head in one module, as the prepared checkpoint names them. Plain torch."""

from __future__ import annotations

import torch
from torch import nn

from vllm_factory.models.deberta_v2 import DebertaModel, LayersFuser
from vllm_factory.plugins.deberta_gliner.config import DebertaGlinerConfig
from vllm_factory.poolers.gliner import gliner_pooler
from vllm_factory.varlen import Varlen


class DebertaGlinerNetwork(nn.Module):
    """DeBERTa encoder, optional layer fusion, GLiNER head."""

    def __init__(self, config: DebertaGlinerConfig) -> None:
        super().__init__()
        encoder, head = config
        self.backbone = DebertaModel(encoder)
        self.layers_fuser = (
            LayersFuser(encoder.num_hidden_layers, encoder.hidden_size) if head.fuse_layers else None
        )
        self.head = gliner_pooler(head, encoder.hidden_size)

    def prepare(self, max_len: int) -> None:
        """Compute what depends on weights alone. Call once, after loading, on the final device."""
        self.backbone.prepare(max_len)
        if self.head.rnn is not None:
            self.head.rnn.flatten_parameters()

    def encode(self, input_ids: torch.Tensor, positions: torch.Tensor, varlen: Varlen) -> torch.Tensor:
        """``[T]`` token ids and positions to ``[T, encoder hidden size]``."""
        layers = self.backbone(input_ids, positions, varlen)
        return layers[-1] if self.layers_fuser is None else self.layers_fuser(layers, varlen)
