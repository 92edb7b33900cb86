"""Turns a checkpoint saved by the gliner library into a directory that vLLM serves.

What the library works out each time it loads a checkpoint is worked out once here: missing configuration keys,
marker tokens of old checkpoints, the tokenizer's special tokens, the index of the label marker. What differs
between encoders is an :class:`EncoderPrep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from vllm_factory.errors import CheckpointError, PrepError, shown
from vllm_factory.poolers.gliner_config import GlinerConfig
from vllm_factory.prep.common import (
    MAX_TOKENS,
    Tensors,
    dtype_name,
    load_tokenizer,
    max_length,
    origin,
    parameters,
    save_tokenizer,
    save_weights,
)
from vllm_factory.prep.detect import GLINER_CONFIG, TEXT_ENCODER, Encoder, encoder_type, hub_encoder_config
from vllm_factory.prep.output import write_json
from vllm_factory.prep.source import Source
from vllm_factory.prep.weights import check_fit, read_tensors, rename
from vllm_factory.registry import MODEL_TYPE, PluginSpec

#: Name prefixes in the library's state dict, and in ours.
PREFIXES = {
    "token_rep_layer.bert_layer.model.": "backbone.",
    "token_rep_layer.bert_layer.layers_fuser.": "layers_fuser.",
    "token_rep_layer.projection.": "head.projection.",
    "rnn.lstm.": "head.rnn.",
    "span_rep_layer.span_rep_layer.": "head.span_rep_layer.",
    "prompt_rep_layer.": "head.prompt_rep_layer.",
    "scorer.": "head.scorer.",
}
#: Saved by the library, not read by its inference either.
IGNORED = (
    r"cross_fuser\..*",  # built for post_fusion_schema, called by training code of other architectures only
    r".*\.embeddings\.position_ids",  # a buffer that older versions of transformers saved
)
#: Keys of gliner_config.json that change what inference computes and that no code here covers.
UNSUPPORTED = {
    "span_encoder_config": "a context encoder in front of the span head",
    "precomputed_prompts_mode": "compressed prompts with fixed labels",
}


class EncoderPrep:
    """What preparing must know of a plugin's encoder. ``config`` is transformers' configuration of it.

    Attributes:
        spec: The plugin.
        embeddings: Name of the word embeddings among the prepared weights.
        keys: Keys of the encoder's configuration to keep; ``None`` for all.
        unsupported: Keys of gliner_config.json that this encoder cannot honour, and what they mean.
        prefixes: Name prefixes in the library's state dict, and in ours.
        ignored: Patterns of tensors that the library saves and its inference does not read.
        overrides: What inference does whatever gliner_config.json says.
        markers: Whether labels stand in the prompt, each behind a marker token.
    """

    prefixes: Mapping[str, str] = PREFIXES
    ignored: tuple[str, ...] = IGNORED
    overrides: Mapping[str, Any] = {}
    markers: bool = True
    spec: PluginSpec
    embeddings: str
    keys: frozenset[str] | None = None
    unsupported: Mapping[str, str] = {}

    def network(self, factory: Mapping[str, Any]) -> nn.Module:
        """A module whose parameters have the names and shapes that the prepared weights must have.

        Args:
            factory: That part of the prepared ``config.json``.

        Raises:
            CheckpointError: The configurations are incomplete or contradict themselves.
        """
        raise NotImplementedError

    def max_tokens(self, config: Any) -> int:
        """Tokens of one prompt."""
        return MAX_TOKENS

    def adapt(self, config: Any, tensors: Tensors) -> None:
        """Mend the renamed tensors where they differ from the network's.

        Raises:
            CheckpointError: They are of a kind that the plugin does not serve.
        """

    def extend(self, source: Source, values: dict[str, Any], tensors: Tensors, output: Path) -> dict[str, Any]:
        """More for the ``factory`` part of ``config.json``, and more files in ``output``.

        Raises:
            PrepError: The checkpoint is incomplete, damaged, or of a kind that is not supported.
        """
        return {}


def prepare_gliner(source: Source, output: Path, encoder: EncoderPrep) -> dict[str, str]:
    """Write the prepared checkpoint into ``output``.

    Returns:
        What was found, for the command line's summary.

    Raises:
        PrepError: The checkpoint is incomplete, damaged, or of a kind that is not supported.
    """
    values = source.json(GLINER_CONFIG)
    for key, what in {**UNSUPPORTED, **encoder.unsupported}.items():
        if values.get(key):
            raise PrepError(f"{source.name}: {key} is set ({what}), which this plugin does not serve")
    values |= encoder.overrides
    tokenizer = _load_tokenizer(source, values)
    if encoder.markers:
        _add_markers(tokenizer, values)
    tensors, unknown = rename(read_tensors(source), encoder.prefixes, encoder.ignored)
    config = encoder_config(source, values)
    try:
        encoder.adapt(config, tensors)
        config.vocab_size = vocabulary(tensors, encoder.embeddings, len(tokenizer))
        factory = _factory(source, encoder, config, values, tokenizer)
        factory |= encoder.extend(source, values, tensors, output)
        with torch.device("meta"):
            network = encoder.network(factory)
    except CheckpointError as error:
        raise PrepError(f"{source.name}: {error}") from error
    check_fit(source, network, tensors, unknown)
    save_tokenizer(tokenizer, output)
    save_weights(tensors, output)
    dtype = dtype_name(tensors[encoder.embeddings])
    write_json(output / "config.json", _hf_config(encoder, config, factory, dtype))
    head = factory["head"]
    return {
        "plugin": encoder.spec.name,
        "head": f"{head['span_mode']}, width {head['max_width']}, {head['num_rnn_layers']} LSTM layers",
        "encoder": f"{config.num_hidden_layers} layers of {config.hidden_size}",
        "parameters": parameters(tensors, dtype),
        "words": f"{head['max_len']} a window, split by {head['words_splitter_type']!r}",
    }


def _load_tokenizer(source: Source, values: dict[str, Any]) -> Any:
    local = source.has("tokenizer_config.json")
    name = source.path if local else values.get("model_name")
    what = "its tokenizer files" if local else f"the tokenizer of {shown(name)}, which it only names,"
    tokenizer = load_tokenizer(source, name or "", what)
    # The library asks for begin and end tokens where the tokenizer defines them, and only there.
    for token in ("bos", "eos"):
        if hasattr(tokenizer, f"add_{token}_token") and getattr(tokenizer, f"{token}_token_id") is not None:
            setattr(tokenizer, f"add_{token}_token", True)
    return tokenizer


def _add_markers(tokenizer: Any, values: dict[str, Any]) -> None:
    """Add the marker tokens as the library does for a checkpoint that leaves their index open."""
    entity, separator = values.setdefault("ent_token", "<<ENT>>"), values.setdefault("sep_token", "<<SEP>>")
    if values.get("class_token_index", -1) == -1 or values.get("vocab_size", -1) == -1:
        tokenizer.add_tokens(["[FLERT]", entity, separator], special_tokens=True)
        values["class_token_index"] = len(tokenizer) - 2
    if tokenizer.convert_tokens_to_ids(entity) != values["class_token_index"]:
        raise PrepError(
            f"the tokenizer gives {shown(entity)} the id {tokenizer.convert_tokens_to_ids(entity)}, "
            f"{GLINER_CONFIG} says class_token_index {values['class_token_index']}"
        )


def encoder_config(source: Source, values: dict[str, Any], encoder: Encoder = TEXT_ENCODER) -> Any:
    """An encoder's full configuration: the saved one lists only what differs from transformers' defaults."""
    from transformers import AutoConfig

    saved = values.get(encoder.config_key)
    if not isinstance(saved, dict):
        saved = hub_encoder_config(source, values, encoder)
    try:
        return AutoConfig.for_model(**{**saved, "model_type": encoder_type(source, values, encoder)})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise PrepError(f"{source.name}: {encoder.config_key}: {' '.join(str(error).split())}") from error


def vocabulary(tensors: Tensors, embeddings: str, tokenizer_size: int) -> int:
    """Rows of the word embeddings.

    Raises:
        CheckpointError: They are not there, or fewer than the tokenizer's tokens.
    """
    if embeddings not in tensors:
        raise CheckpointError(f"the weights hold no {embeddings.removeprefix('backbone.')} of the encoder")
    rows = tensors[embeddings].shape[0]
    if tokenizer_size > rows:
        raise CheckpointError(f"the tokenizer knows {tokenizer_size} tokens, the embeddings {rows}")
    return rows


def _factory(
    source: Source, encoder: EncoderPrep, config: Any, values: dict[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """What only this package reads of ``config.json``."""
    head = GlinerConfig.from_dict(values)
    backbone = config.to_dict()
    return {
        **origin(encoder.spec, source),
        # Where the library's own tokenizer call cuts; "truncation": "truncate" cuts there too.
        "tokenizer_max_length": max_length(tokenizer),
        "backbone": {key: backbone[key] for key in sorted(backbone) if encoder.keys is None or key in encoder.keys},
        "head": asdict(head),
    }


def _hf_config(encoder: EncoderPrep, config: Any, factory: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What vLLM reads of ``config.json``, and ``factory``."""
    return {
        "architectures": [encoder.spec.architecture],
        "model_type": MODEL_TYPE,
        "io_processor_plugin": encoder.spec.io_name,
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": encoder.max_tokens(config),
        "is_causal": False,
        "factory": factory,
    }
