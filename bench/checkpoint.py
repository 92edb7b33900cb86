"""GLiNER checkpoints of published sizes with random weights, and texts for them. No hub is needed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LABELS = ["person", "organization", "location", "date", "event", "product", "law", "quantity"]
_ONSETS = tuple(
    "b br c ch cl d dr f fl g gr h j k l m n p pl pr qu r s sc sh sl st t th tr v w z".split()  # noqa: SIM905
)
_NUCLEI = ("a", "ai", "e", "ea", "ee", "i", "ie", "o", "oa", "oo", "ou", "u")
_CODAS = ["", "", "", "b", "ck", "d", "l", "ll", "m", "n", "nd", "ng", "nt", "r", "rd", "s", "st", "t", "x"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """An encoder's and a head's size."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    buckets: int = 256
    max_words: int = 512
    max_width: int = 12


SIZES = {
    "tiny": Size(layers=2, hidden=64, heads=4, vocabulary=6_003, buckets=32),
    "small": Size(layers=6, hidden=768, heads=12, vocabulary=128_004),
    "base": Size(layers=12, hidden=768, heads=12, vocabulary=128_004),
    "large": Size(layers=24, hidden=1024, heads=16, vocabulary=128_004),
}


def word_list(count: int = 3_000, seed: int = 0) -> list[str]:
    """Pronounceable words, a quarter of them capitalised."""
    rng = random.Random(seed)
    words: set[str] = set()
    while len(words) < count:
        syllables = rng.choices((1, 2, 3), (5, 4, 2))[0]
        word = "".join(rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS) for _ in range(syllables))
        words.add(word.capitalize() if rng.random() < 0.25 else word)
    return sorted(words)


def texts(count: int, words: tuple[int, int], seed: int = 1) -> list[str]:
    """``count`` texts of between ``words[0]`` and ``words[1]`` words, all different."""
    rng = random.Random(seed)
    vocabulary = word_list()
    return [" ".join(rng.choices(vocabulary, k=rng.randint(*words))) for _ in range(count)]


def train_tokenizer(directory: Path) -> None:
    """A tokenizer for the benchmark's words, with about as many tokens a word as DeBERTa v3's has for English."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=6_000, special_tokens=special)
    tokenizer.train_from_iterator([*texts(300, (100, 200), seed=9), " ".join(LABELS)], trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **names).save_pretrained(directory)


def build(size: Size, checkpoint: Path, device: str, seed: int = 0) -> None:
    """Build and save ``checkpoint`` with the reference library.

    Weights are drawn so that activations keep their scale through the layers, as trained ones do.
    """
    from gliner import GLiNER
    from gliner.config import GLiNERConfig
    from transformers import DebertaV2Config

    base = checkpoint.parent / f"{checkpoint.name}-tokenizer"
    train_tokenizer(base)
    encoder = DebertaV2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        relative_attention=True,
        position_buckets=size.buckets,
        max_relative_positions=-1,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
    )
    config = GLiNERConfig(
        model_name=str(base),
        encoder_config=encoder.to_dict(),
        hidden_size=size.hidden,
        max_width=size.max_width,
        max_len=size.max_words,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = GLiNER.from_config(config, backbone_from_pretrained=False)
    _draw(model)
    _rows(model, size.vocabulary)
    model.config.model_name = "benchmark-encoder"
    model.save_pretrained(checkpoint, safe_serialization=True)


@torch.no_grad()
def _draw(model: Any) -> None:
    for name, parameter in model.model.named_parameters():
        if "LayerNorm" in name:
            continue
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.02
        torch.nn.init.normal_(parameter, std=0.02 if "embeddings" in name else scale)


def _rows(model: Any, rows: int) -> None:
    """Give the embeddings their published number of rows: the library cut them to the tokenizer's."""
    model.model.token_rep_layer.resize_token_embeddings(rows)
    model.config.vocab_size = rows
    model.config.encoder_config.vocab_size = rows


def load_reference(checkpoint: Path, device: str, dtype: torch.dtype) -> Any:
    """The checkpoint in the reference library."""
    from gliner import GLiNER

    model = GLiNER.from_pretrained(str(checkpoint), local_files_only=True, map_location=device)
    return model.to(dtype).eval()
