"""Tiny ColLFM2s in the published layout, run by sauerkrautlm-colpali's own forward pass."""

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
    as_published,
    results,
    rewrite,
)
from references.common import byte_bpe, draw, fresh

__all__ = ["ENVIRONMENT", "REQUIREMENTS", "WITHOUT_DEPENDENCIES"]

SPECIAL = [
    "<|pad|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
]
DIM = 128


@dataclass(frozen=True)
class Variant:
    """One checkpoint.

    Attributes:
        name: Its folder.
        seed: Of the weights.
        images: Of the image processor.
        text, vision: Over the tiny defaults.
        prefix: Of all names of weights; the library takes both.
    """

    name: str
    seed: int
    images: dict[str, Any]
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    prefix: str = ""


VARIANTS = [
    # Tiles and thumbnail; a convolution first and last.
    Variant(
        "tiles",
        1,
        {"encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 20, "max_tiles": 6},
    ),
    # Other tiles, an attention layer last, and names as a trainer leaves them.
    Variant(
        "wide",
        2,
        {
            "encoder_patch_size": 8,
            "tile_size": 48,
            "min_image_tokens": 2,
            "max_image_tokens": 12,
            "min_tiles": 3,
            "max_tiles": 8,
            "max_pixels_tolerance": 1.5,
        },
        text={"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "conv_L_cache": 4},
        vision={"patch_size": 8, "num_patches": 16},
        prefix="base_model.",
    ),
    # Images are never cut; heads that vLLM's attention on the CPU does not take.
    Variant(
        "whole",
        3,
        {"encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 30}
        | {"do_image_splitting": False},
        text={"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
]


def main(output: Path) -> None:
    """Write the checkpoints and golden files."""
    for variant in VARIANTS:
        build(variant, output)


def build(variant: Variant, output: Path) -> None:
    """Build the base model, put the library's class around it, save both as published, and run it."""
    import torch
    from safetensors.torch import save_file
    from sauerkrautlm_colpali.models.lfm2.collfm2 import ColLFM2, ColLFM2Processor
    from transformers import AutoProcessor, Lfm2VlForConditionalGeneration

    checkpoint = fresh(output / variant.name) / "checkpoint"
    processor = _processor(variant)
    processor.save_pretrained(checkpoint)
    torch.manual_seed(variant.seed)
    base = Lfm2VlForConditionalGeneration(_config(variant, processor.tokenizer)).float()

    class Float32(ColLFM2):  # type: ignore[misc]
        """The library's class without its constructor, which wants bfloat16 and flash attention."""

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.base_model = base
            self.custom_text_proj = torch.nn.Linear(base.config.text_config.hidden_size, DIM)
            self.mask_non_image_embeddings = False

    model = Float32().eval()
    draw(model, variant.seed)
    as_published(model)
    base.save_pretrained(checkpoint)
    saved = {
        name.removeprefix("base_model."): tensor.bfloat16().contiguous().clone()
        for name, tensor in model.state_dict().items()
        if "lm_head" not in name
    }
    save_file({variant.prefix + name: tensor for name, tensor in saved.items()}, checkpoint / "model.safetensors")
    rewrite(
        checkpoint / "config.json",
        architectures=["ColLFM2"],
        model_type="collfm2",
        dtype="bfloat16",
        base_model="LiquidAI/LFM2-VL-450M",
        dim=DIM,
    )
    reader = ColLFM2Processor(AutoProcessor.from_pretrained(checkpoint))

    def run(batch: Any, **notes: Any) -> Result:
        with torch.no_grad():
            vectors = model(**batch)[0].numpy()
        return vectors, batch["input_ids"][0].numpy(), notes

    def picture(image: Any, _: str | None) -> Result:
        batch = reader.process_images([image])
        tokens = int((batch["input_ids"] == SPECIAL.index("<image>")).sum())
        pixels = batch["pixel_values"]
        notes = {"shapes": batch["spatial_shapes"].tolist(), "pixels": [float(pixels.mean()), float(pixels.std())]}
        return run(batch, patches=tokens, **notes)

    results(
        output,
        variant.name,
        variant.seed,
        lambda text: run(reader.process_queries([text])),
        lambda text: run(reader.process_texts([text])),
        picture,
    )


def _processor(variant: Variant) -> Any:
    from transformers import Lfm2VlImageProcessorFast, Lfm2VlProcessor

    names = {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "extra_special_tokens": {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
    }
    tokenizer = byte_bpe(SPECIAL, "<|startoftext|> $A", names, size=600)
    return Lfm2VlProcessor(Lfm2VlImageProcessorFast(**variant.images), tokenizer)


def _config(variant: Variant, tokenizer: Any) -> Any:
    from transformers import Lfm2VlConfig

    return Lfm2VlConfig(
        text_config={
            "model_type": "lfm2",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            # vLLM's attention on the CPU begins at heads of 32.
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "layer_types": ["conv", "full_attention", "conv", "conv"]
            if variant.name != "wide"
            else ["conv", "conv", "full_attention", "full_attention"],
            "block_auto_adjust_ff_dim": variant.name == "wide",
            "block_multiple_of": 32,
            **variant.text,
        },
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "num_patches": 64,
            "vision_use_head": False,
            **variant.vision,
        },
        image_token_id=SPECIAL.index("<image>"),
        downsample_factor=2,
        projector_hidden_size=48,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
