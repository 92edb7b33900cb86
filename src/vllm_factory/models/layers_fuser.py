"""gliner's ``fuse_layers``: a weighted sum of all layers of an encoder. Plain torch.

Shape legend: K layers, T tokens, S sequences, E hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vllm_factory.varlen import Varlen


class LayersFuser(nn.Module):
    """Weighted sum of all layers (gliner's ``fuse_layers``): squeeze-and-excitation over each sequence."""

    def __init__(self, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(hidden_size, 1)
        self.W1 = nn.Linear(num_layers, num_layers // 2)
        self.W2 = nn.Linear(num_layers // 2, num_layers)
        self.output_projection = nn.Linear(hidden_size, hidden_size)

    def forward(self, layers: list[torch.Tensor], varlen: Varlen) -> torch.Tensor:
        """``K`` tensors ``[T, E]`` to ``[T, E]``; the weights are means over a sequence's own tokens."""
        stacked = torch.stack(layers)
        squeezed = self.squeeze(stacked).squeeze(-1).T
        sequence, counts = _sequence_of_token(varlen, stacked.shape[1])
        sums = squeezed.new_zeros(len(varlen.lengths) + 1, len(layers)).index_add_(0, sequence, squeezed)
        weights = torch.sigmoid(self.W2(F.relu(self.W1(sums / counts.to(sums.dtype)))))
        fused = torch.einsum("kte,tk->te", stacked, weights[sequence])
        return self.output_projection(fused)


def _sequence_of_token(varlen: Varlen, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T]`` sequence of each token (rows behind the last sequence get a bin of their own), ``[S + 1, 1]``."""
    lengths = [*varlen.lengths, num_tokens - varlen.num_tokens]
    counts = torch.tensor(lengths, device=varlen.device)
    sequence = torch.repeat_interleave(
        torch.arange(len(lengths), device=varlen.device), counts, output_size=num_tokens
    )
    return sequence, counts.clamp(min=1).unsqueeze(-1)
