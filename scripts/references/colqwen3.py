"""Tiny ColQwen3s, saved and run by sauerkrautlm-colpali."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from references.colpali_cases import (
    ENVIRONMENT,
    REQUIREMENTS,
    WITHOUT_DEPENDENCIES,
    Result,
    qwen_config,
    qwen_parts,
    results,
    rewrite,
)
from references.common import draw, fresh

__all__ = ["ENVIRONMENT", "REQUIREMENTS", "WITHOUT_DEPENDENCIES"]


@dataclass(frozen=True)
class Variant:
    """One checkpoint.

    Attributes:
        name: Its folder.
        seed: Of the weights.
        dim: Of the vectors; ``None`` leaves the library's 128, and nothing in ``config.json``.
        text, vision: Over the tiny defaults.
        least, most: Tokens of an image.
        model_type: In ``config.json``; the library takes both.
    """

    name: str
    seed: int
    dim: int | None
    least: int
    most: int
    model_type: str
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)


VARIANTS = [
    Variant("narrow", 1, 16, 4, 60, "colqwen3"),
    Variant(
        "default",
        2,
        None,
        1,
        32,
        "qwen3_vl",
        text={"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        vision={"patch_size": 16, "hidden_size": 32, "num_heads": 1, "num_position_embeddings": 36},
    ),
]


def main(output: Path) -> None:
    """Write the checkpoints and golden files."""
    for variant in VARIANTS:
        build(variant, output)


def build(variant: Variant, output: Path) -> None:
    """Build one as the library does, save it, load it as a user would, and run it."""
    import torch
    from sauerkrautlm_colpali.models import ColQwen3, ColQwen3Processor

    checkpoint = fresh(output / variant.name) / "checkpoint"
    parts = qwen_parts(variant.vision, least=variant.least, most=variant.most)
    config = qwen_config(parts["tokenizer"], text=variant.text, vision=variant.vision)
    if variant.dim is not None:
        config.dim = variant.dim
    torch.manual_seed(variant.seed)
    model = ColQwen3(config).float()
    draw(model, variant.seed)
    model.bfloat16().save_pretrained(checkpoint)
    rewrite(checkpoint / "config.json", model_type=variant.model_type)
    ColQwen3Processor(**parts).save_pretrained(checkpoint)

    model = ColQwen3.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval()
    processor = ColQwen3Processor.from_pretrained(checkpoint)
    processor.image_token_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def run(batch: Any, **notes: Any) -> Result:
        with torch.no_grad():
            vectors = model(**batch)[0].numpy()
        return vectors, batch["input_ids"][0].numpy(), notes

    def picture(image: Any, _: str | None) -> Result:
        batch = processor.process_images([image])
        pixels = batch["pixel_values"]
        tokens = int((batch["input_ids"] == processor.image_token_id).sum())
        notes = {"grid": batch["image_grid_thw"][0].tolist(), "pixels": [float(pixels.mean()), float(pixels.std())]}
        return run(batch, patches=tokens, **notes)

    results(
        output,
        variant.name,
        variant.seed,
        lambda text: run(processor.process_queries([text])),
        lambda text: run(processor.process_texts([text])),
        picture,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
