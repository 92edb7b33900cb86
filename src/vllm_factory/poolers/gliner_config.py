"""The keys of a ``gliner_config.json`` that inference reads (gliner 0.2.29)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_factory.errors import CheckpointError, shown

SPAN_MODES = (
    "marker",
    "markerV0",
    "markerV1",
    "markerV2",
    "query",
    "mlp",
    "cat",
    "conv_conv",
    "conv_max",
    "conv_mean",
    "conv_sum",
    "conv_share",
)
TOKEN_LEVEL = "token_level"
SUBTOKEN_POOLING = ("first", "last", "mean", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class GlinerConfig:
    """A uni-encoder GLiNER, with the library's defaults.

    Attributes:
        hidden_size: Width of the head; the encoder's output is projected when its own width differs.
        max_width: Longest span in words. Unused by the token-level head.
        span_mode: How spans are represented, or ``"token_level"``.
        subtoken_pooling: How a word's tokens become one vector.
        embed_ent_token: A label is its marker token; otherwise the token behind the marker.
        num_rnn_layers: LSTM layers over the words; 0 for none.
        fuse_layers: Use a weighted sum of all encoder layers instead of the last one.
        represent_spans: Token-level head only: score whole spans in a second step.
        max_len: Words the model reads of one text.
        words_splitter_type: How a text is split into words.
        class_token_index: Token id of the label marker.
        ent_token, sep_token: Text of the markers before each label and behind the last one.
    """

    hidden_size: int = 512
    max_width: int = 12
    span_mode: str = "markerV0"
    subtoken_pooling: str = "first"
    embed_ent_token: bool = True
    num_rnn_layers: int = 1
    fuse_layers: bool = False
    represent_spans: bool = False
    max_len: int = 384
    words_splitter_type: str = "whitespace"
    class_token_index: int = -1
    ent_token: str = "<<ENT>>"
    sep_token: str = "<<SEP>>"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GlinerConfig:
        """From the dictionary of a ``gliner_config.json``; other keys are ignored.

        Raises:
            CheckpointError: A value is outside what the library itself can save.
        """
        names = {f.name for f in fields(cls)}
        config = cls(**{key: value for key, value in values.items() if key in names and value is not None})
        config.check()
        return config

    def check(self) -> None:
        """Refuse values that no head exists for."""
        if self.span_mode not in (*SPAN_MODES, TOKEN_LEVEL):
            raise CheckpointError(
                f"span_mode {shown(self.span_mode)}; known are {', '.join((*SPAN_MODES, TOKEN_LEVEL))}"
            )
        if self.subtoken_pooling not in SUBTOKEN_POOLING:
            raise CheckpointError(
                f"subtoken_pooling {shown(self.subtoken_pooling)}; known are {', '.join(SUBTOKEN_POOLING)}"
            )
        if self.max_width < 1 or self.max_len < 1:
            raise CheckpointError(f"max_width {self.max_width} and max_len {self.max_len} must be positive")

    @property
    def token_level(self) -> bool:
        """Whether start, end and inside of entities are scored word by word."""
        return self.span_mode == TOKEN_LEVEL

    @property
    def sends_word_bounds(self) -> bool:
        """Whether pooling needs all tokens of a word, not one."""
        return self.subtoken_pooling in ("mean", "max")
