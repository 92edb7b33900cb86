"""Tiny Nemotron ColEmbeds in the published layout, run on transformers.

The published model is code beside its weights, which no library holds. What it does to transformers' Qwen3-VL is
done here in our own words: the text model attends to both sides, its last normalisation is left out, and states are
brought to length one. The published processor writes prompts with the checkpoint's chat template.
"""

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

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Variant:
    """One checkpoint.

    Attributes:
        name: Its folder.
        seed: Of the weights.
        settings: In ``processor_config.json``, over the published processor's defaults.
        least, most: Tokens of an image.
        text, vision: Over the tiny defaults.
    """

    name: str
    seed: int
    settings: dict[str, Any]
    least: int
    most: int
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)


DEFAULTS = {
    "q_max_length": 512,
    "p_max_length": 4096,
    "query_prefix": "query:",
    "passage_prefix": "passage:",
    "reserve_tokens_for_images": 100,
}
VARIANTS = [
    Variant("published", 1, {}, 4, 60),
    # Queries and pages that are cut; no prefix for documents.
    Variant(
        "short",
        2,
        {"q_max_length": 40, "p_max_length": 200, "passage_prefix": "", "reserve_tokens_for_images": 60},
        1,
        40,
        text={"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3},
        vision={"patch_size": 16, "hidden_size": 32, "num_heads": 1, "num_position_embeddings": 36},
    ),
]


def main(output: Path) -> None:
    """Write the checkpoints and golden files."""
    for variant in VARIANTS:
        build(variant, output)


def build(variant: Variant, output: Path) -> None:
    """Build one, save it as published, load the files, and run it."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

    checkpoint = fresh(output / variant.name) / "checkpoint"
    parts = qwen_parts(variant.vision, least=variant.least, most=variant.most, template=TEMPLATE)
    config = qwen_config(parts["tokenizer"], text=variant.text, vision=variant.vision, tie_word_embeddings=True)
    torch.manual_seed(variant.seed)
    model = Qwen3VLForConditionalGeneration(config).float()
    draw(model, variant.seed)
    model.bfloat16().save_pretrained(checkpoint)
    Qwen3VLProcessor(**parts, chat_template=TEMPLATE).save_pretrained(checkpoint)
    settings = {**DEFAULTS, **variant.settings}
    (checkpoint / "processor_config.json").write_text("{}\n", encoding="utf-8")
    rewrite(checkpoint / "processor_config.json", **settings, processor_class="Qwen3VLNemotronEmbedProcessor")

    loaded = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = Qwen3VLProcessor.from_pretrained(checkpoint)
    rewrite(
        checkpoint / "config.json",
        architectures=["Qwen3VLNemotronEmbedModel"],
        model_type="qwen3_vl_nemotron_embed",
        pooling="colbert",
    )
    if variant.name == "short":
        # The published processor does without, and so may a checkpoint.
        (checkpoint / "video_preprocessor_config.json").unlink()
    run = _runner(loaded.model)

    def written(prefix: str, text: str, *content: dict[str, Any]) -> str:
        message = {"role": "user", "content": [*content, {"type": "text", "text": prefix + text}]}
        prompt: str = processor.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return prompt

    def prefixed(name: str) -> str:
        return f"{settings[name]} " if settings[name] else ""

    def cut(prompt: str, tokens: int, **images: Any) -> Any:
        return processor(text=[prompt], **images, truncation=True, max_length=tokens, return_tensors="pt")

    def query(text: str) -> Result:
        prompt = written(f"Query: {prefixed('query_prefix')}", text)
        return run(cut(prompt, settings["q_max_length"]))

    def passage(text: str) -> Result:
        prompt = written(prefixed("passage_prefix"), text)
        return run(cut(prompt, settings["p_max_length"] - settings["reserve_tokens_for_images"]))

    def page(image: Any, text: str | None) -> Result:
        prompt = written(prefixed("passage_prefix"), text or "", {"type": "image"})
        whole = processor(text=[prompt], images=[image], return_tensors="pt")
        grid = whole["image_grid_thw"][0].tolist()
        tokens = grid[1] * grid[2] // processor.image_processor.merge_size**2
        left = settings["p_max_length"] - tokens - settings["reserve_tokens_for_images"]
        return run(cut(prompt, left, images=[image]), grid=grid, patches=tokens)

    results(output, variant.name, variant.seed, query, passage, page, beside=True)


def _runner(model: Any) -> Any:
    """Run a Qwen3-VL as the published code does."""
    import torch
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    for layer in model.language_model.layers:
        layer.self_attn.is_causal = False
    # Nobody is masked: a prompt alone has no padding.
    modeling_qwen3_vl.create_causal_mask = lambda **_: None
    model.language_model.norm = torch.nn.Identity()

    def run(batch: Any, **notes: Any) -> Result:
        with torch.no_grad():
            states = model(**batch).last_hidden_state[0]
        return torch.nn.functional.normalize(states, dim=-1).numpy(), batch["input_ids"][0].numpy(), notes

    return run


if __name__ == "__main__":
    main(Path(sys.argv[1]))
