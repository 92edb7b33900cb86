"""Building, saving and running models that read texts and page images: what the recipes of such plugins share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from references.common import DOCUMENTS, QUERIES, store, versions

ENVIRONMENT = "sauerkrautlm-colpali-0.1.0"
REQUIREMENTS = (
    "torch==2.8.0",
    "torchvision==0.23.0",
    "transformers==4.57.6",
    "numpy==2.4.6",
    "pillow==13.0.0",
    "scipy==1.17.1",
    "requests==2.34.2",
    "hf-transfer==0.1.9",
    "peft==0.17.1",
)
#: It asks for nothing beyond the above; its own pins would take another transformers.
WITHOUT_DEPENDENCIES = ("sauerkrautlm-colpali==0.1.0",)

#: Characters of the longest text: files stay small, and nothing is cut by these models but by tokens.
LONGEST = 600

#: Vectors, token ids, and what is worth noting of how they came about.
Result = tuple[np.ndarray, np.ndarray, dict[str, Any]]


def pictures(folder: Path) -> dict[str, Any]:
    """Pages and odd shapes, drawn the same way every time and stored once for all plugins: RGB by name."""
    from PIL import Image, ImageDraw

    def page(width: int, height: int, lines: int) -> Any:
        image = Image.new("RGB", (width, height), "white")
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 0, width, max(2, height // 20)), fill=(70, 130, 180))
        for line in range(lines):
            top = int(height * (0.1 + 0.8 * line / lines))
            words = " ".join(DOCUMENTS[(line + shift) % 2] for shift in range(2))
            draw.text((width // 12, top), words[line * 3 : line * 3 + width // 7], fill=(20, 20, line * 9 % 200))
        return image

    def gradient(width: int, height: int) -> Any:
        across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
        image = Image.fromarray(np.stack([across, down, (across + down) / 2], -1).astype(np.uint8))
        ImageDraw.Draw(image).ellipse((width // 4, height // 4, width // 2, height // 2), fill=(250, 220, 40))
        return image

    drawn = {
        "page": page(210, 297, 12),
        "large page": page(450, 350, 14),
        "wide": page(332, 27, 1),
        "dot": Image.new("RGB", (1, 1), (200, 30, 30)),
        "gradient": gradient(160, 120),
        "square": gradient(64, 64),
        "tall": gradient(49, 151),
        "grey": gradient(90, 60).convert("L").convert("RGB"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in drawn.items():
        image.save(folder / f"{name.replace(' ', '_')}.png", optimize=True)
    return drawn


def results(
    output: Path,
    variant: str,
    seed: int,
    query: Callable[[str], Result],
    passage: Callable[[str], Result],
    image: Callable[[Any, str | None], Result],
    *,
    beside: bool = False,
) -> None:
    """Vectors of every text and image alone, and scores of every pair, into the variant's folder.

    Args:
        output: The plugin's folder.
        variant: The checkpoint's folder in it.
        seed: Of its weights.
        query, passage, image: The library's result for one item.
        beside: Also give images together with texts.
    """
    drawn = pictures(output.parent / "images")
    arrays: dict[str, np.ndarray] = {}
    cases: list[dict[str, Any]] = []

    def add(key: str, case: dict[str, Any], result: Result) -> None:
        vectors, ids, notes = result
        assert vectors.shape[0] == ids.shape[0], key
        assert np.isfinite(vectors).all(), key
        arrays[key], arrays[f"{key}_ids"] = vectors.astype(np.float32), ids.astype(np.int32)
        cases.append({"key": key, **case, **notes})

    for index, each in enumerate(QUERIES):
        add(f"query_{index}", {"text": each, "is_query": True}, query(each))
    for index, each in enumerate(text[:LONGEST] for text in DOCUMENTS):
        add(f"document_{index}", {"text": each, "is_query": False}, passage(each))
    for name, picture in drawn.items():
        file = f"{name.replace(' ', '_')}.png"
        add(f"image_{file[:-4]}", {"image": file, "is_query": False}, image(picture, None))
        if beside and name in ("page", "square"):
            add(
                f"both_{name}",
                {"image": file, "text": DOCUMENTS[1], "is_query": False},
                image(picture, DOCUMENTS[1]),
            )
    kept = [case for case in cases if not case["is_query"]]
    scores = np.array(
        [
            [float((arrays[f"query_{q}"] @ arrays[case["key"]].T).max(1).sum()) for case in kept]
            for q in range(len(QUERIES))
        ],
        np.float32,
    )
    assert scores.std() > 0.1, "the scores do not differ"
    arrays["scores"] = scores
    meta = {
        "cases": cases,
        "queries": QUERIES,
        "documents": [{key: case[key] for key in ("text", "image") if key in case} for case in kept],
        "seed": seed,
        "versions": versions("sauerkrautlm-colpali", "transformers", "torch", "torchvision", "pillow", "numpy"),
    }
    store(output / variant, meta, arrays)


def as_published(model: Any) -> None:
    """Round the weights, and nothing else, to bfloat16, as which such checkpoints are published."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def rewrite(file: Path, **changes: Any) -> None:
    """Change values of a JSON file."""
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**content, **changes}, indent=2) + "\n", encoding="utf-8")


#: Special tokens of Qwen's tokenizers that its vision models need, by role.
QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]


def qwen_config(tokenizer: Any, *, text: dict[str, Any], vision: dict[str, Any], **options: Any) -> Any:
    """A tiny Qwen3-VL's configuration, with the token ids of ``tokenizer``."""
    from transformers import Qwen3VLConfig

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in QWEN_SPECIAL}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            # vLLM's attention on the CPU begins at heads of 32.
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
            **text,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "out_hidden_size": text.get("hidden_size", 64),
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            **vision,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        **options,
    )


def qwen_parts(vision: dict[str, Any], *, least: int, most: int, template: str | None = None) -> dict[str, Any]:
    """Tokenizer, image and video processor of a tiny Qwen3-VL.

    Args:
        vision: Of the vision configuration.
        least, most: Tokens of an image.
        template: Of chats.
    """
    from transformers import Qwen2TokenizerFast, Qwen2VLImageProcessorFast, Qwen3VLVideoProcessor

    from references.common import byte_bpe

    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    trained = byte_bpe(QWEN_SPECIAL, "$A", names).backend_tokenizer
    tokenizer = Qwen2TokenizerFast(tokenizer_object=trained, unk_token=None, **names)
    tokenizer.chat_template = template
    patch, merge = vision.get("patch_size", 8), vision.get("spatial_merge_size", 2)
    area = (patch * merge) ** 2
    sizes = {"shortest_edge": least * area, "longest_edge": most * area}
    common = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 2, "size": sizes}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return {
        "tokenizer": tokenizer,
        "image_processor": Qwen2VLImageProcessorFast(**common, **half),
        "video_processor": Qwen3VLVideoProcessor(**common, **half),
    }
