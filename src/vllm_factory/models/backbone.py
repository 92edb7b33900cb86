"""What every encoder of this package offers to the network around it. Plain torch: no vLLM import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vllm_factory.varlen import Varlen


class Backbone(nn.Module):
    """An encoder over a flat batch of sequences.

    Call :meth:`prepare` once after the weights are loaded.

    Attributes:
        num_layers: Length of the list that :meth:`forward` returns.
        hidden_size: Width of the hidden states.
    """

    num_layers: int
    hidden_size: int

    def prepare(self, max_len: int) -> None:
        """Compute what depends on weights alone, for sequences of up to ``max_len`` tokens."""
        raise NotImplementedError

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` to ``[T, embedding size]``."""
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, varlen: Varlen) -> list[torch.Tensor]:
        """Hidden states of every layer.

        Args:
            input_ids: ``[T]`` int.
            positions: ``[T]`` int, position of each token within its sequence.
            varlen: Boundaries of the sequences.

        Returns:
            One ``[T, E]`` per layer; the last is the encoder's output.
        """
        raise NotImplementedError


class Network(nn.Module):
    """A backbone and a head under the names of the prepared checkpoint.

    Attributes:
        backbone: The encoder.
        head: A :class:`~vllm_factory.pooling.protocol.FactoryPooler`.
    """

    backbone: Backbone
    head: Any

    @classmethod
    def from_factory(cls, factory: Mapping[str, Any]) -> Network:
        """From what a prepared ``config.json`` holds under ``factory``.

        Raises:
            CheckpointError: The configurations are incomplete or contradict themselves.
        """
        raise NotImplementedError

    def prepare(self, max_len: int) -> None:
        """Compute what depends on weights alone. Call once, after loading, on the final device."""
        self.backbone.prepare(max_len)

    def encode(self, input_ids: torch.Tensor, positions: torch.Tensor, varlen: Varlen) -> torch.Tensor:
        """``[T]`` token ids and positions to ``[T, encoder hidden size]``."""
        return self.backbone(input_ids, positions, varlen)[-1]
