"""Tiny GLiNER2 checkpoints, built and saved by the reference library with seeded random weights.

Weights are drawn wide enough that scores spread over (0, 1) and that tasks have different counts, so that a
comparison of results and scores is a strict test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gliner2 import GLiNER2, Schema
from gliner2.configuration import ExtractorConfig
from transformers import DebertaV2Config

from checkpoints import TEXTS, V3, train_tokenizer

SCHEMA = {
    "entities": {"person": "a human being", "place": "", "étiquette": {"threshold": 0.3}, "date of birth": {}},
    "structures": {
        "meeting": {
            "fields": [
                {"name": "who"},
                {"name": "where", "dtype": "str"},
                {"name": "tone", "dtype": "str", "choices": ["Formal", "casual", "New York"]},
                {"name": "tags", "choices": ["a", "b"], "threshold": 0.2, "description": "labels"},
            ]
        }
    },
    "relations": {"works for": {"threshold": 0.2}, "located in": "a place within another"},
    "classifications": [
        {"task": "topic", "labels": ["news", "sports", "art"]},
        {"task": "mood", "labels": {"good": "happy", "bad": "sad"}, "multi_label": True, "cls_threshold": 0.3},
    ],
}


@dataclass(frozen=True)
class Gliner2Recipe:
    """One checkpoint: its name, encoder, head, tokenizer and seed."""

    name: str
    encoder: dict[str, Any] = field(default_factory=lambda: V3)
    head: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = "unigram"
    hidden: int = 32
    seed: int = 0


def build_gliner2(recipe: Gliner2Recipe, directory: Path) -> Path:
    """Build and save one checkpoint in the library's layout."""
    torch.manual_seed(recipe.seed)
    encoder = DebertaV2Config(
        vocab_size=500,
        hidden_size=recipe.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * recipe.hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **recipe.encoder,
    )
    config = ExtractorConfig(model_name="tiny-encoder", **{"max_width": 5, **recipe.head})
    model = GLiNER2(config, encoder_config=encoder, tokenizer=train_tokenizer(recipe.tokenizer)).eval()
    _spread(model)
    model.save_pretrained(str(directory / recipe.name))
    return directory / recipe.name


def _spread(model: GLiNER2) -> None:
    """Redraw the weights until there is something to compare, and not everything is found."""
    schema = Schema.from_dict(SCHEMA)
    for _ in range(100):
        _draw(model)
        raw = [model.extract(text, schema, include_spans=True, format_results=False) for text in TEXTS[:6]]
        entities = sum(len(spans) for one in raw for found in one["entities"] for spans in found.values())
        records = [len(one["meeting"]) for one in raw]
        relations = sum(len(one["works for"]) for one in raw)
        if 4 < entities < 120 and len(set(records)) > 1 and max(records) > 1 and relations:
            return
    raise AssertionError("no draw gave usable scores")


@torch.no_grad()
def _draw(model: GLiNER2) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=(2.0 / parameter.shape[-1]) ** 0.5)
        elif "norm" not in name.lower() or "bias" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    for module in model.count_embed.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.fill_(1.0)
    final = model.span_rep.span_rep_layer.out_project[-1]
    final.weight.mul_(0.2)
    final.bias.mul_(0.2)


def load_gliner2(path: Path) -> GLiNER2:
    """The reference model."""
    return GLiNER2.from_pretrained(str(path)).eval()
