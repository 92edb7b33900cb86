"""What the recipes share. Runs in the reference libraries' environments: nothing of this package is imported."""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

#: Texts of several scripts and lengths, some of them hostile.
DOCUMENTS = [
    "Tim Cook is the chief executive of Apple; its headquarters are in Cupertino, California.",
    "Angela Merkel met him on 12 March 2019 (in Berlin).",
    "one",
    "?!",
    "  leading and trailing   space\t",
    "İstanbul'da yağmur yağdı; IŞIK Üniversitesi öğrencileri ISTANBUL Havalimanı'na gitti.",
    "東京タワーは東京都港区にあります。",
    "I 💛 New York 🗽! zero\u200bwidth",
    "[MASK] and [SEP] stand in this text, and [Q] too",
    " ".join(f"Sentence {i} says that retrieval, in the end, is about {i * 7} words." for i in range(40)),
]
QUERIES = [
    "Who runs Apple?",
    "Merkel",
    "?",
    "where is the TOKYO tower, and how do I get there from Haneda airport by train, please tell me in short words",
    " ".join(f"word{i}" for i in range(80)),
]


def versions(*distributions: str) -> dict[str, str]:
    """Versions of what made the files."""
    return {"python": platform.python_version(), **{name: version(name) for name in distributions}}


def store(directory: Path, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """``golden.json`` and ``golden.npz`` beside the checkpoint."""
    text = json.dumps(meta, indent=1, ensure_ascii=False, sort_keys=True)
    (directory / "golden.json").write_text(text + "\n", encoding="utf-8")
    np.savez_compressed(directory / "golden.npz", **dict(arrays))  # type: ignore[arg-type]  # the names are ours


def fresh(directory: Path) -> Path:
    """The directory, empty."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def draw(model: Any, seed: int) -> None:
    """Redraw all weights, wide enough that tokens differ and attention is not flat."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * math.sqrt(2.0 / parameter.shape[-1]))
            elif name.endswith("weight"):  # of a normalisation
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)


def byte_bpe(special: Sequence[str], template: str, names: Mapping[str, Any], size: int = 500) -> Any:
    """A byte-level BPE tokenizer trained on the texts above.

    Args:
        special: Special tokens; their ids are their places.
        template: Of a single text, ``"[CLS] $A [SEP]"``.
        names: Roles of special tokens, ``{"mask_token": "[MASK]"}``.
        size: Of the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*DOCUMENTS[:-1], *QUERIES[:-1]] * 3, trainer)
    used = [(token, tokenizer.token_to_id(token)) for token in special if token in template.split()]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
