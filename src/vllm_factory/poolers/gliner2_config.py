"""What inference reads of the ``config.json`` of a GLiNER2 span model (gliner2 2.1.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_factory.errors import CheckpointError, shown

COUNTING_LAYERS = ("count_lstm", "count_lstm_v2", "count_lstm_moe")
TOKEN_POOLING = ("first", "mean", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gliner2Config:
    """A GLiNER2 head, with the library's defaults.

    Attributes:
        max_width: Longest span in words.
        counting_layer: How the vectors of a schema's fields become those of its first, second ... record.
        token_pooling: How a word's tokens become one vector.
    """

    max_width: int = 8
    counting_layer: str = "count_lstm"
    token_pooling: str = "first"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Gliner2Config:
        """From a checkpoint's configuration, old (``max_width`` at the top) or new (in ``span_head``).

        Raises:
            CheckpointError: A value is outside what the library itself can save.
        """
        span_head = values.get("span_head") or {}
        if span_head.get("span_mode", "markerV0") != "markerV0":
            raise CheckpointError(f"span_mode {shown(span_head['span_mode'])}; the library builds markerV0 only")
        pooling = values.get("token_pooling")
        config = cls(
            max_width=int(span_head.get("max_width") or values.get("max_width") or 8),
            counting_layer=str(values.get("counting_layer") or "count_lstm"),
            # The library reads any other value as "first".
            token_pooling=str(pooling) if pooling in TOKEN_POOLING else "first",
        )
        config.check()
        return config

    def check(self) -> None:
        """Refuse values that no head exists for."""
        if self.counting_layer not in COUNTING_LAYERS:
            raise CheckpointError(
                f"counting_layer {shown(self.counting_layer)}; known are {', '.join(COUNTING_LAYERS)}"
            )
        if self.max_width < 1:
            raise CheckpointError(f"max_width {self.max_width} must be positive")
