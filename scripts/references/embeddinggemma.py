"""Tiny EmbeddingGemmas, saved and run by sentence-transformers."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from references.common import DOCUMENTS, QUERIES, draw, fresh, store, versions
from references.pylate_cases import ENVIRONMENT, REQUIREMENTS, WITHOUT_DEPENDENCIES

__all__ = ["ENVIRONMENT", "REQUIREMENTS", "WITHOUT_DEPENDENCIES"]

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "Clustering": "task: clustering | query: ",
}


@dataclass(frozen=True)
class Variant:
    """One checkpoint.

    Attributes:
        name: Its folder.
        seed: Of the weights.
        pooling: Arguments of the pooling module.
        pooled: How many poolings are joined.
        prompts: By name.
        default_prompt: Name of the prompt of ``encode`` without one.
        normalize: Whether there is a normalising module.
        dense: Arguments of the dense modules but their widths.
        backbone: What differs from the usual tiny backbone.
        max_tokens: Of the Transformer module.
    """

    name: str
    seed: int
    pooling: dict[str, Any]
    pooled: int = 1
    prompts: dict[str, str] = field(default_factory=lambda: PROMPTS)
    default_prompt: str | None = None
    normalize: bool = True
    dense: tuple[dict[str, Any], ...] = ({"bias": False}, {"bias": False})
    backbone: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 64


VARIANTS = [
    # As published, but for the sizes.
    Variant("mean", 11, {"pooling_mode": "mean"}),
    Variant(
        "joined",
        12,
        {
            "pooling_mode_mean_tokens": False,
            "pooling_mode_cls_token": True,
            "pooling_mode_weightedmean_tokens": True,
            "pooling_mode_lasttoken": True,
            "include_prompt": False,
        },
        pooled=3,
        prompts={"passage": "passage: "},
        default_prompt="passage",
        normalize=False,
        dense=({"bias": True}, {"bias": True}),
        backbone={
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        max_tokens=40,
    ),
    Variant(
        "no-prompt",
        13,
        {"pooling_mode": "mean", "include_prompt": False},
        default_prompt="Clustering",
        # Heads that vLLM's attention on the CPU does not take.
        backbone={"head_dim": 48},
        max_tokens=90,
    ),
]


def tokenizer() -> Any:
    """Gemma's own tokenizer class, on pieces of the texts."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    # No piece goes beyond a word, or a whole sentence would become one.
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL)
    trained.train_from_iterator([*DOCUMENTS[:6], *QUERIES[:-1], *PROMPTS.values()] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return GemmaTokenizer(vocab=model["vocab"], merges=merges, add_bos_token=True, add_eos_token=True)


def backbone_values(variant: Variant, vocab_size: int) -> dict[str, Any]:
    """Arguments of the backbone's configuration. Half of the window is to each side."""
    usual = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        # vLLM's attention on the CPU begins at heads of 32.
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "max_position_embeddings": 256,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "use_bidirectional_attention": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    return {**usual, **variant.backbone}


def build(variant: Variant, checkpoint: Path) -> None:
    """Save one checkpoint."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer
    from torch import nn
    from transformers import Gemma3TextConfig, Gemma3TextModel

    tokens = tokenizer()
    values = backbone_values(variant, len(tokens))
    width = values["hidden_size"]
    with tempfile.TemporaryDirectory() as scratch:
        tokens.save_pretrained(scratch)
        torch.manual_seed(variant.seed)
        Gemma3TextModel(Gemma3TextConfig(**values)).save_pretrained(scratch)
        restore_window(Path(scratch), values["sliding_window"])
        modules: list[Any] = [
            Transformer(scratch, max_seq_length=variant.max_tokens),
            Pooling(width, **variant.pooling),
            Dense(variant.pooled * width, 96, activation_function=nn.Identity(), **variant.dense[0]),
            Dense(96, 24, activation_function=nn.Identity(), **variant.dense[1]),
        ]
        if variant.normalize:
            modules.append(Normalize())
        model = SentenceTransformer(
            modules=modules, device="cpu", prompts=variant.prompts, default_prompt_name=variant.default_prompt
        )
        draw(model, variant.seed)
        model.save_pretrained(str(checkpoint), create_model_card=False)
    restore_window(checkpoint, values["sliding_window"])


def restore_window(directory: Path, window: int) -> None:
    """transformers 5.3 saves the window that it has halved, and would halve it once more."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sliding_window": window}, indent=2) + "\n")


def results(model: Any, variant: Variant) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Vectors of every text with every prompt, as ``encode_query`` and ``encode_document`` give them, and cut."""
    arrays: dict[str, np.ndarray] = {}
    cases: list[dict[str, Any]] = []

    def add(text: str, array: np.ndarray, **data: Any) -> None:
        key = f"vector_{len(cases)}"
        arrays[key] = array
        cases.append({"key": key, "text": text, **data})

    for text in [*DOCUMENTS, *QUERIES]:
        add(text, model.encode(text))
        add(text, model.encode_query(text), is_query=True)
        add(text, model.encode_document(text), is_query=False)
        for name in model.prompts:
            add(text, model.encode(text, prompt_name=name), prompt_name=name)
        for prompt in ("custom: ", ""):
            add(text, model.encode(text, prompt=prompt), prompt=prompt)
        for size in (1, 8, 23):
            # Normalised again where the checkpoint normalises at all.
            options = {"truncate_dim": size, "normalize_embeddings": variant.normalize}
            add(text, model.encode(text, **options), dimensions=size)
        add(text, model.encode_query(text, **options), is_query=True, dimensions=size)
    assert model.tokenize(DOCUMENTS[:1])["input_ids"].shape[1] > 12, "words are no tokens"
    assert all(np.isfinite(array).all() for array in arrays.values())
    whole = np.stack([arrays[case["key"]] for case in cases if "dimensions" not in case])
    assert whole.std(0).mean() > 0.05, "the vectors do not differ"
    return {"cases": cases, "documents": DOCUMENTS}, arrays


def main(output: Path) -> None:
    """Write the checkpoints and golden files."""
    from sentence_transformers import SentenceTransformer

    for variant in VARIANTS:
        directory = fresh(output / variant.name)
        build(variant, directory / "checkpoint")
        # As a user would load it, not as it was built.
        model = SentenceTransformer(str(directory / "checkpoint"), device="cpu")
        meta, arrays = results(model, variant)
        made_by = versions("sentence-transformers", "transformers", "torch", "numpy")
        store(directory, {**meta, "seed": variant.seed, "versions": made_by}, arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
