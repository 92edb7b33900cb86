"""Turns a checkpoint saved by the gliner library into a directory that vLLM serves.

What the library works out each time it loads a checkpoint is worked out once here: missing configuration keys,
marker tokens of old checkpoints, the tokenizer's special tokens, the index of the label marker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_factory import __version__
from vllm_factory.errors import CheckpointError, PrepError, shown
from vllm_factory.plugins.deberta_gliner.config import DebertaGlinerConfig
from vllm_factory.plugins.deberta_gliner.network import DebertaGlinerNetwork
from vllm_factory.prep.detect import GLINER_CONFIG, hub_encoder_config
from vllm_factory.prep.output import write_json
from vllm_factory.prep.source import Source
from vllm_factory.prep.weights import check_fit, read_tensors, rename
from vllm_factory.registry import MODEL_TYPE, plugin

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
EMBEDDINGS = "backbone.embeddings.word_embeddings.weight"
#: Tokens (labels and text) of one prompt when positions are relative, so that nothing else bounds them.
#: Larger inputs are windowed. ``--max-model-len`` changes it.
MAX_TOKENS = 4096
#: Keys of gliner_config.json that change what inference computes and that no code here covers.
UNSUPPORTED = {
    "span_encoder_config": "a context encoder in front of the span head",
    "precomputed_prompts_mode": "compressed prompts with fixed labels",
}


def prepare(source: Source, output: Path) -> dict[str, str]:
    """Write the prepared checkpoint into ``output``.

    Returns:
        What was found, for the command line's summary.

    Raises:
        PrepError: The checkpoint is incomplete, damaged, or of a kind that is not supported.
    """
    values = source.json(GLINER_CONFIG)
    for key, what in UNSUPPORTED.items():
        if values.get(key):
            raise PrepError(f"{source.name}: {key} is set ({what}), which this plugin does not serve")
    tokenizer = _load_tokenizer(source, values)
    _add_markers(tokenizer, values)
    tensors, unknown = rename(read_tensors(source), PREFIXES, IGNORED)
    backbone = _backbone_values(source, values)
    backbone["vocab_size"] = _vocabulary(source, tensors, len(tokenizer))
    config = _configs(source, backbone, values)
    if not config.encoder.position_biased_input:
        tensors.pop("backbone.embeddings.position_embeddings.weight", None)  # saved by some, used by none
    with torch.device("meta"):
        network = DebertaGlinerNetwork(config)
    check_fit(source, network, tensors, unknown)
    _save_tokenizer(tokenizer, output)
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, output / "model.safetensors")
    dtype = str(tensors[EMBEDDINGS].dtype).removeprefix("torch.")
    write_json(output / "config.json", _hf_config(source, config, backbone, tokenizer, dtype))
    return {
        "plugin": "deberta_gliner",
        "head": f"{config.head.span_mode}, width {config.head.max_width}, {config.head.num_rnn_layers} LSTM layers",
        "encoder": f"{config.encoder.num_hidden_layers} layers of {config.encoder.hidden_size}",
        "parameters": f"{sum(t.numel() for t in tensors.values()) / 1e6:.1f} million, {dtype}",
        "words": f"{config.head.max_len} a window, split by {config.head.words_splitter_type!r}",
    }


def _load_tokenizer(source: Source, values: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    local = source.has("tokenizer_config.json")
    name = str(source.path) if local else values.get("model_name")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers lets errors of many libraries through
        where = "its tokenizer files" if local else f"the tokenizer of {shown(name)}, which it only names,"
        raise PrepError(f"{source.name}: {where} cannot be loaded: {str(error).splitlines()[0]}") from error
    if not tokenizer.is_fast:
        raise PrepError(f"{source.name}: {type(tokenizer).__name__} has no fast version, which word offsets need")
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


def _backbone_values(source: Source, values: dict[str, Any]) -> dict[str, Any]:
    """The encoder's full configuration: the saved one lists only what differs from transformers' defaults."""
    from transformers import DebertaV2Config

    saved = values.get("encoder_config")
    if not isinstance(saved, dict):
        saved = hub_encoder_config(source, values)
    full: dict[str, Any] = DebertaV2Config(**saved).to_dict()
    return full


def _vocabulary(source: Source, tensors: dict[str, torch.Tensor], tokenizer_size: int) -> int:
    if EMBEDDINGS not in tensors:
        raise PrepError(f"{source.name}: the weights hold no DeBERTa word embeddings")
    rows = tensors[EMBEDDINGS].shape[0]
    if tokenizer_size > rows:
        raise PrepError(f"{source.name}: the tokenizer knows {tokenizer_size} tokens, the embeddings {rows}")
    return rows


def _configs(source: Source, backbone: dict[str, Any], head: dict[str, Any]) -> DebertaGlinerConfig:
    from vllm_factory.models.deberta_v2 import DebertaConfig
    from vllm_factory.poolers.gliner_config import GlinerConfig

    try:
        return DebertaGlinerConfig(DebertaConfig.from_dict(backbone), GlinerConfig.from_dict(head))
    except CheckpointError as error:
        raise PrepError(f"{source.name}: {error}") from error


def _save_tokenizer(tokenizer: Any, output: Path) -> None:
    # Whoever loads the directory must not be cut short by the tokenizer: we cut ourselves, at word boundaries.
    tokenizer.model_max_length, limit = 10**9, tokenizer.model_max_length
    tokenizer.save_pretrained(output)
    tokenizer.model_max_length = limit


def _hf_config(
    source: Source,
    config: DebertaGlinerConfig,
    backbone: dict[str, Any],
    tokenizer: Any,
    dtype: str,
) -> dict[str, Any]:
    encoder, head = config
    spec = plugin("deberta_gliner")
    max_tokens = encoder.max_position_embeddings if encoder.position_biased_input else MAX_TOKENS
    head_values = {key: getattr(head, key) for key in type(head).__dataclass_fields__}
    return {
        "architectures": [spec.architecture],
        "model_type": MODEL_TYPE,
        "io_processor_plugin": spec.io_name,
        "dtype": dtype,
        "hidden_size": encoder.hidden_size,
        "num_hidden_layers": encoder.num_hidden_layers,
        "num_attention_heads": encoder.num_attention_heads,
        "intermediate_size": encoder.intermediate_size,
        "vocab_size": encoder.vocab_size,
        "max_position_embeddings": max_tokens,
        "is_causal": False,
        "factory": {
            "plugin": spec.name,
            "prepared_by": f"vllm-factory {__version__}",
            "prepared_from": Path(source.name).name if Path(source.name).is_dir() else source.name,
            # Where the library's own tokenizer call cuts; "truncation": "truncate" cuts there too.
            "tokenizer_max_length": min(tokenizer.model_max_length, 10**9),
            "backbone": {
                key: backbone[key] for key in sorted(type(encoder).__dataclass_fields__) if key in backbone
            },
            "head": head_values,
        },
    }
