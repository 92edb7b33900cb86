"""The label encoder of a bi-encoder GLiNER: one vector a label. Plain torch.

gliner 0.2.29, ``modeling/encoder.py``: the last hidden states (or all layers, fused), projected to the head's
width where it differs, and then their mean over a label's own tokens, the special ones included.

Shape legend: T tokens of all labels, N labels, E hidden size of the encoder, D of the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vllm_factory.models.backbone import Backbone
from vllm_factory.models.layers_fuser import LayersFuser
from vllm_factory.varlen import Varlen


class LabelEncoder(nn.Module):
    """Encoder, optional layer fusion, optional projection, mean.

    Args:
        backbone: The encoder.
        hidden_size: D.
        fuse_layers: Use a weighted sum of all layers.
    """

    def __init__(self, backbone: Backbone, hidden_size: int, *, fuse_layers: bool) -> None:
        super().__init__()
        layers, size = backbone.num_layers, backbone.hidden_size
        self.backbone = backbone
        self.layers_fuser = LayersFuser(layers, size) if fuse_layers else None
        self.projection = nn.Linear(size, hidden_size) if size != hidden_size else None

    def prepare(self, max_len: int) -> None:
        """Compute what depends on weights alone, for labels of up to ``max_len`` tokens."""
        self.backbone.prepare(max_len)

    def forward(self, token_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """``[T]`` tokens of ``N`` labels, each of at least one, to ``[N, D]`` in the model's dtype."""
        varlen = Varlen(lengths, token_ids.device)
        counts = torch.tensor(lengths, device=token_ids.device)
        starts = torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts, output_size=varlen.num_tokens)
        positions = torch.arange(varlen.num_tokens, device=token_ids.device) - starts
        layers = self.backbone(token_ids, positions, varlen)
        states = layers[-1] if self.layers_fuser is None else self.layers_fuser(layers, varlen)
        if self.projection is not None:
            states = self.projection(states)
        # Each sum by itself and in order: the same label has the same vector beside whatever other labels.
        mean = torch.segment_reduce(states.float(), "mean", lengths=counts, axis=0)
        return mean.to(states.dtype)
