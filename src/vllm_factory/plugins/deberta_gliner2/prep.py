"""Turns a span model saved by the gliner2 library into a directory that vLLM serves.

What the library works out each time it loads a checkpoint is worked out once here: the markers of the prompt,
which it adds to the tokenizer, and settings that older checkpoints keep elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_factory.errors import CheckpointError, PrepError, shown
from vllm_factory.models.deberta_v2 import DebertaConfig
from vllm_factory.plugins.deberta_gliner2.config import DebertaGliner2Config
from vllm_factory.plugins.deberta_gliner2.network import DebertaGliner2Network
from vllm_factory.poolers.gliner2_config import Gliner2Config
from vllm_factory.prep.common import (
    MAX_TOKENS,
    drop_unused_positions,
    dtype_name,
    load_tokenizer,
    origin,
    parameters,
    save_tokenizer,
    save_weights,
)
from vllm_factory.prep.detect import gliner2_encoder_config
from vllm_factory.prep.output import write_json
from vllm_factory.prep.source import Source
from vllm_factory.prep.weights import check_fit, read_tensors, rename
from vllm_factory.registry import MODEL_TYPE, plugin

#: Name prefixes in the library's state dict, and in ours.
PREFIXES = {
    "encoder.": "backbone.",
    "span_rep.span_rep_layer.": "head.span_rep_layer.",
    "classifier.": "head.classifier.",
    "count_pred.": "head.count_pred.",
    "count_embed.": "head.count_embed.",
}
#: Saved by some versions of transformers: a buffer.
IGNORED = (r".*\.embeddings\.position_ids",)
EMBEDDINGS = "backbone.embeddings.word_embeddings.weight"
#: In the order in which the library adds them, which decides their ids.
MARKERS = (
    "[SEP_STRUCT]",
    "[SEP_TEXT]",
    "[P]",
    "[C]",
    "[E]",
    "[R]",
    "[L]",
    "[EXAMPLE]",
    "[OUTPUT]",
    "[DESCRIPTION]",
)


def prepare(source: Source, output: Path) -> dict[str, str]:
    """Write the prepared checkpoint into ``output``.

    Returns:
        What was found, for the command line's summary.

    Raises:
        PrepError: The checkpoint is incomplete, damaged, or of a kind that is not supported.
    """
    values = source.json("config.json")
    tokenizer = load_tokenizer(source, source.path, "its tokenizer files")
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    tensors, unknown = rename(read_tensors(source), PREFIXES, IGNORED)
    backbone = _backbone_values(source)
    backbone["vocab_size"] = _vocabulary(source, tensors, len(tokenizer))
    config = _configs(source, backbone, values)
    drop_unused_positions(tensors, "backbone.", config.encoder.position_biased_input)
    with torch.device("meta"):
        network = DebertaGliner2Network(config)
    check_fit(source, network, tensors, unknown)
    save_tokenizer(tokenizer, output)
    save_weights(tensors, output)
    dtype = dtype_name(tensors[EMBEDDINGS])
    write_json(output / "config.json", _hf_config(source, config, backbone, dtype))
    return {
        "plugin": "deberta_gliner2",
        "head": f"{config.head.counting_layer}, spans of up to {config.head.max_width} words",
        "encoder": f"{config.encoder.num_hidden_layers} layers of {config.encoder.hidden_size}",
        "parameters": parameters(tensors, dtype),
    }


def _backbone_values(source: Source) -> dict[str, Any]:
    """The encoder's full configuration: the saved one lists only what differs from transformers' defaults."""
    from transformers import DebertaV2Config

    full: dict[str, Any] = DebertaV2Config(**gliner2_encoder_config(source)).to_dict()
    return full


def _vocabulary(source: Source, tensors: dict[str, torch.Tensor], tokenizer_size: int) -> int:
    if EMBEDDINGS not in tensors:
        raise PrepError(f"{source.name}: the weights hold no DeBERTa word embeddings")
    rows = tensors[EMBEDDINGS].shape[0]
    if tokenizer_size > rows:
        raise PrepError(
            f"{source.name}: with the markers {shown(MARKERS[0])} to {shown(MARKERS[-1])} the tokenizer knows "
            f"{tokenizer_size} tokens, the embeddings {rows}"
        )
    return rows


def _configs(source: Source, backbone: dict[str, Any], head: dict[str, Any]) -> DebertaGliner2Config:
    try:
        return DebertaGliner2Config(DebertaConfig.from_dict(backbone), Gliner2Config.from_dict(head))
    except CheckpointError as error:
        raise PrepError(f"{source.name}: {error}") from error


def _hf_config(
    source: Source, config: DebertaGliner2Config, backbone: dict[str, Any], dtype: str
) -> dict[str, Any]:
    encoder, head = config
    spec = plugin("deberta_gliner2")
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
        "max_position_embeddings": (
            encoder.max_position_embeddings if encoder.position_biased_input else MAX_TOKENS
        ),
        "is_causal": False,
        "factory": {
            **origin(spec, source),
            "backbone": {
                key: backbone[key] for key in sorted(type(encoder).__dataclass_fields__) if key in backbone
            },
            "head": {key: getattr(head, key) for key in type(head).__dataclass_fields__},
        },
    }
