"""Tiny LFM2 ColBERTs, saved and run by PyLate."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from references.common import byte_bpe
from references.pylate_cases import ENVIRONMENT, REQUIREMENTS, WITHOUT_DEPENDENCIES, Variant, run

__all__ = ["ENVIRONMENT", "REQUIREMENTS", "WITHOUT_DEPENDENCIES"]

#: There is no mask token: queries are filled up with the end token.
NAMES = {"pad_token": "<|pad|>", "bos_token": "<|startoftext|>", "eos_token": "<|im_end|>"}
SPECIAL = ["<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_end|>"]
#: As published; one of the variants ends its texts with the token that fills up queries.
TEMPLATE = "<|startoftext|> $A"
ENDED = "<|startoftext|> $A <|im_end|>"

VARIANTS = [
    Variant("hidden", 21, {"query_length": 32, "document_length": 48}, copies=2),
    Variant(
        "attended",
        22,
        {
            "query_length": 24,
            "document_length": 64,
            "attend_to_expansion_tokens": True,
            "query_prefix": "[unused0]",
            "document_prefix": "[unused1]",
            "skiplist_words": [".", ",", "one"],
        },
        dense=[
            {"out_features": 48, "bias": True, "use_residual": True},
            {"out_features": 24, "bias": True},
        ],
        lower=True,
        copies=2,
    ),
    Variant("ended", 23, {"query_length": 30, "document_length": 56}, copies=2),
    Variant(
        "unexpanded",
        24,
        {"query_length": 40, "document_length": 300, "do_query_expansion": False, "document_prefix": ""},
        prompts={"search_query": "search_query: ", "search_document": "search_document: "},
        copies=2,
    ),
]
BACKBONES: dict[str, dict[str, Any]] = {
    # What transformers does not read and vLLM does, as it stands in published files.
    "hidden": {"conv_dim": 64, "block_dim": 64},
    "attended": {
        "conv_L_cache": 4,
        "conv_bias": True,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "conv", "full_attention"],
    },
    "ended": {
        "conv_bias": True,
        "conv_L_cache": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 16,
    },
    # Heads that vLLM's attention on the CPU does not take.
    "unexpanded": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def main(output: Path) -> None:
    """Write the checkpoints and golden files."""
    import torch
    from transformers import Lfm2Config, Lfm2Model

    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer = byte_bpe(SPECIAL, ENDED if variant.name == "ended" else TEMPLATE, NAMES)
            tokenizer.save_pretrained(scratch)
            usual = {
                "vocab_size": len(tokenizer) + 2,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 4,
                # vLLM's attention on the CPU begins at heads of 32.
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 512,
                "layer_types": ["conv", "conv", "full_attention", "conv"],
                "block_auto_adjust_ff_dim": False,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 3,
            }
            torch.manual_seed(variant.seed)
            Lfm2Model(Lfm2Config(**{**usual, **BACKBONES[variant.name]})).save_pretrained(scratch)
            # Activations are modules, which stand here because torch is not everywhere that this file is read.
            if variant.name == "attended":
                variant.dense[0]["activation_function"] = torch.nn.GELU()
            run(Path(scratch), variant, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
