"""Tiny ModernBERT ColBERTs, saved and run by PyLate."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from references.common import byte_bpe
from references.pylate_cases import ENVIRONMENT, REQUIREMENTS, WITHOUT_DEPENDENCIES, Variant, run

__all__ = ["ENVIRONMENT", "REQUIREMENTS", "WITHOUT_DEPENDENCIES"]

SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]

VARIANTS = [
    # Mask tokens that nobody sees; those far from the text see nobody in the local layers either.
    Variant("hidden", 1, {"query_length": 32, "document_length": 48}),
    Variant(
        "attended",
        2,
        {
            "query_length": 24,
            "document_length": 64,
            "attend_to_expansion_tokens": True,
            "query_prefix": "[unused0]",
            "document_prefix": "[unused1]",
            # The second is no token: the unknown token is skipped for it.
            "skiplist_words": [".", "notatoken", ",", "one"],
        },
        dense=[
            {"out_features": 48, "bias": True, "use_residual": True},
            {"out_features": 48, "bias": False, "use_residual": True},
            {"out_features": 24, "bias": True},
        ],
        lower=True,
    ),
    Variant(
        "unexpanded",
        3,
        {"query_length": 40, "document_length": 300, "do_query_expansion": False, "document_prefix": ""},
        prompts={"search_query": "search_query: ", "search_document": "search_document: "},
    ),
]


def main(output: Path) -> None:
    """Write the checkpoints and golden files."""
    import torch
    from transformers import ModernBertConfig, ModernBertModel

    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as scratch:
            names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
            tokenizer = byte_bpe(SPECIAL, "[CLS] $A [SEP]", names)
            tokenizer.save_pretrained(scratch)
            config = ModernBertConfig(
                vocab_size=len(tokenizer) + 2,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=3,
                # vLLM's attention on the CPU begins at heads of 32; one variant has smaller ones.
                num_attention_heads=4 if variant.name == "unexpanded" else 2,
                max_position_embeddings=512,
                local_attention=16,
                global_attn_every_n_layers=3,
                pad_token_id=3,
                cls_token_id=1,
                bos_token_id=1,
                sep_token_id=2,
                eos_token_id=2,
            )
            torch.manual_seed(variant.seed)
            ModernBertModel(config).save_pretrained(scratch)
            # Activations are modules, which stand here because torch is not everywhere that this file is read.
            if variant.name == "attended":
                variant.dense[0]["activation_function"] = torch.nn.GELU()
                variant.dense[1]["activation_function"] = torch.nn.Tanh()
            run(Path(scratch), variant, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
