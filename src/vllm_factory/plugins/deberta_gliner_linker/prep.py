"""Turns a bi-encoder GLiNER on two DeBERTa encoders into a directory that vLLM serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from vllm_factory.errors import CheckpointError, PrepError, shown
from vllm_factory.io.tokens import LABELS_TOKENIZER
from vllm_factory.plugins.deberta_gliner.prep import DebertaPrep
from vllm_factory.plugins.deberta_gliner_linker.network import DebertaGlinerLinkerNetwork
from vllm_factory.poolers.gliner_bi import MAX_LABEL_TOKENS
from vllm_factory.prep.common import Tensors, drop_unused_positions, load_tokenizer, max_length, save_tokenizer
from vllm_factory.prep.detect import LABELS_ENCODER
from vllm_factory.prep.gliner import IGNORED, PREFIXES, encoder_config, prepare_gliner, vocabulary
from vllm_factory.prep.source import Source
from vllm_factory.registry import plugin

_LABELS = "head.labels_encoder."


class LinkerPrep(DebertaPrep):
    """See :class:`~vllm_factory.prep.gliner.EncoderPrep`."""

    spec = plugin("deberta_gliner_linker")
    markers = False
    prefixes = {  # noqa: RUF012 (declared by the base class)
        **PREFIXES,
        "token_rep_layer.labels_encoder.model.": f"{_LABELS}backbone.",
        "token_rep_layer.labels_encoder.layers_fuser.": f"{_LABELS}layers_fuser.",
        "token_rep_layer.labels_projection.": f"{_LABELS}projection.",
    }
    # The library builds an LSTM when the configuration asks for one, saves it, and never runs it.
    ignored = (*IGNORED, r"rnn\..*")
    overrides = {"num_rnn_layers": 0}  # noqa: RUF012
    unsupported = {  # noqa: RUF012
        "post_fusion_schema": "attention between labels and text behind the two encoders"
    }

    def network(self, factory: Any) -> nn.Module:
        return DebertaGlinerLinkerNetwork.from_factory(factory)

    def extend(self, source: Source, values: dict[str, Any], tensors: Tensors, output: Path) -> dict[str, Any]:
        config = encoder_config(source, values, LABELS_ENCODER)
        drop_unused_positions(tensors, f"{_LABELS}backbone.", config.position_biased_input)
        tokenizer = _labels_tokenizer(source, values)
        try:
            config.vocab_size = vocabulary(
                tensors, f"{_LABELS}backbone.embeddings.word_embeddings.weight", len(tokenizer)
            )
        except CheckpointError as error:
            raise PrepError(f"{source.name}: label encoder: {error}") from error
        save_tokenizer(tokenizer, output / LABELS_TOKENIZER)
        saved = config.to_dict()
        positions = config.max_position_embeddings if config.position_biased_input else MAX_LABEL_TOKENS
        return {
            "labels": {
                "backbone": {key: saved[key] for key in sorted(saved) if key in (self.keys or saved)},
                "tokenizer_max_length": max_length(tokenizer),
                "max_tokens": min(positions, MAX_LABEL_TOKENS),
            }
        }


def _labels_tokenizer(source: Source, values: dict[str, Any]) -> Any:
    if source.has(f"{LABELS_TOKENIZER}/tokenizer_config.json"):
        return load_tokenizer(source, source.path / LABELS_TOKENIZER, "the files of its labels_tokenizer")
    name = values[LABELS_ENCODER.name_key]
    return load_tokenizer(source, name, f"the tokenizer of its label encoder {shown(name)}, which it only names,")


def prepare(source: Source, output: Path) -> dict[str, str]:
    """See :func:`~vllm_factory.prep.gliner.prepare_gliner`."""
    return prepare_gliner(source, output, LinkerPrep())
