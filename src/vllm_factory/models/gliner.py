"""A GLiNER with one encoder as one module, under the names of the prepared checkpoint. Plain torch."""

from __future__ import annotations

import torch

from vllm_factory.models.backbone import Backbone, Network
from vllm_factory.models.layers_fuser import LayersFuser
from vllm_factory.poolers.gliner import GlinerPooler
from vllm_factory.varlen import Varlen


class GlinerNetwork(Network):
    """Encoder, optional layer fusion, head. Plugins say which encoder.

    Args:
        backbone: The encoder.
        head: The head.
    """

    def __init__(self, backbone: Backbone, head: GlinerPooler) -> None:
        super().__init__()
        layers, size = backbone.num_layers, backbone.hidden_size
        self.backbone = backbone
        self.layers_fuser = LayersFuser(layers, size) if head.config.fuse_layers else None
        self.head = head

    def prepare(self, max_len: int) -> None:
        """Compute what depends on weights alone. Call once, after loading, on the final device."""
        super().prepare(max_len)
        self.head.prepare()

    def encode(self, input_ids: torch.Tensor, positions: torch.Tensor, varlen: Varlen) -> torch.Tensor:
        """``[T]`` token ids and positions to ``[T, encoder hidden size]``."""
        layers = self.backbone(input_ids, positions, varlen)
        return layers[-1] if self.layers_fuser is None else self.layers_fuser(layers, varlen)
