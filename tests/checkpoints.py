"""Tiny GLiNER checkpoints, built and saved by the reference library with seeded random weights.

No hub is needed: the tokenizers are trained here on the texts of the tests. Weights are drawn wide enough that
scores spread over (0, 1), so that a comparison of entities and scores is a strict test.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gliner import GLiNER
from gliner.config import GLiNERConfig
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast, T5Tokenizer

from vllm_factory.registry import plugin_for_encoder

TEXTS = [
    "Angela Merkel met Tim Cook at Apple's headquarters in Cupertino on 12 March 2019.",
    "The state-of-the-art plant in Łódź, built by Müller & Söhne, cost $3.5m (about €3.2m).",
    "İstanbul'da yağmur yağdı; IŞIK Üniversitesi öğrencileri ISTANBUL Havalimanı'na gitti.",
    "cafe\u0301 au lait — nai\u0308ve re\u0301sume\u0301, Å vs A\u030a",
    "I 💛 New York 🗽! 👩‍👩‍👧‍👦 visited 東京タワー and 北京 last week.",
    "zero\u200bwidth \u200b joiner\u200d and \ufeff marks",
    "one",
    "?",
    "Dr. O'Neill-Smith_3 e-mailed john.doe@example.com about ISO-9001 at 10:30 a.m.",
    "日本語のテキストには空白がありません。株式会社トヨタ自動車は愛知県にあります。",
    "مرحبا بالعالم في دبي والقاهرة",
    "a\x00b tab\tnew\nline\r\n  spaced   out  ",
]
LABELS = ["person", "organization", "place", "date of birth", "étiquette", "製品", "💛"]

V3 = {
    "relative_attention": True,
    "position_buckets": 16,
    "max_relative_positions": -1,
    "max_position_embeddings": 64,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}
V2 = {
    **V3,
    "position_buckets": -1,
    "max_relative_positions": 24,
    "norm_rel_ebd": "none",
    "share_att_key": False,
    "conv_kernel_size": 3,
    "conv_act": "gelu",
    "type_vocab_size": 2,
}


def _deberta(hidden: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 2 * hidden,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **V3,
    }


def _t5(hidden: int) -> dict[str, Any]:
    return {
        "d_model": hidden,
        "d_kv": 12,
        "d_ff": 2 * hidden,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "relative_attention_max_distance": 40,
    }


def _modernbert(hidden: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": 4,
        # vLLM's attention on the CPU begins at heads of 32.
        "num_attention_heads": hidden // 32,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 512,
        "local_attention": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
    }


#: By ``model_type``, configuration of a tiny encoder for its hidden size.
ENCODERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "deberta-v2": _deberta,
    "modernbert": _modernbert,
    "mt5": _t5,
    "t5": _t5,
}


@dataclass(frozen=True)
class Recipe:
    """One checkpoint: its name, encoder (``model_type`` and what differs), head, tokenizer and seed.

    With ``labels``, what differs in the encoder of labels, it is a bi-encoder.
    """

    name: str
    family: str = "deberta-v2"
    encoder: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = "unigram"
    hidden: int = 32
    seed: int = 0
    safe: bool = True
    labels: dict[str, Any] | None = None
    labels_tokenizer: str = "wordpiece"

    @property
    def plugin(self) -> str:
        """The plugin that serves it."""
        if self.labels is not None:
            return "deberta_gliner_linker"
        spec = plugin_for_encoder(self.family, token_level=self.head.get("span_mode") == "token_level")
        assert spec is not None
        return spec.name


def train_tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """A fast tokenizer of the given algorithm with special tokens around every sequence; or T5's, which has one."""
    if kind == "t5":
        return _train_t5_tokenizer()
    if kind == "gemma":
        return _train_gemma_tokenizer()
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    corpus = [*TEXTS, *LABELS] * 3
    trainer: Any = None
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram(unigram_pieces(special), unk_id=special.index("[UNK]")))
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    if trainer is not None:
        tokenizer.train_from_iterator(corpus, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )


def _train_t5_tokenizer() -> T5Tokenizer:
    """T5's own class: nothing in front of a sequence, ``</s>`` behind it."""
    return T5Tokenizer(vocab=unigram_pieces(["<pad>", "</s>", "<unk>"]), extra_ids=0)


def unigram_pieces(special: list[str], size: int = 400) -> list[tuple[str, float]]:
    """Pieces and scores for a Unigram model: all characters of the corpus, and its most frequent pieces.

    The library's own trainer breaks ties differently in every process, and a checkpoint must be the same in all.
    """
    words = [f"▁{word}" for text in [*TEXTS, *LABELS] for word in unicodedata.normalize("NFKC", text).split()]
    counts = Counter(
        word[start:end]
        for word in words
        for start in range(len(word))
        for end in range(start + 1, start + 7)
        if end <= len(word)
    )
    characters = sorted(piece for piece in counts if len(piece) == 1)
    longer = sorted((p for p in counts if len(p) > 1), key=lambda p: (-counts[p] * len(p), p))
    pieces = [*characters, *longer[: size - len(characters)]]
    total = sum(counts[piece] for piece in pieces)
    return [*((token, 0.0) for token in special), *((p, math.log(counts[p] / total)) for p in pieces)]


def _train_gemma_tokenizer() -> PreTrainedTokenizerFast:
    """mmBERT's kind: pieces of BPE with bytes for what is unknown, and a beginning and an end token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special)
    tokenizer.train_from_iterator([*TEXTS[:4], *LABELS] * 3, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<bos>", "<eos>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def build(recipe: Recipe, directory: Path) -> Path:
    """Build and save one checkpoint in the library's layout."""
    torch.manual_seed(recipe.seed)
    base = directory / f"{recipe.name}-tokenizer"
    train_tokenizer(recipe.tokenizer).save_pretrained(base)
    values = {"vocab_size": 500, **ENCODERS[recipe.family](recipe.hidden), **recipe.encoder}
    encoder = AutoConfig.for_model(recipe.family, **values)
    head = {"hidden_size": recipe.hidden, "max_width": 6, "max_len": 40, "dropout": 0.0, **recipe.head}
    config = GLiNERConfig(model_name=str(base), encoder_config=encoder.to_dict(), **head)
    if recipe.labels is not None:
        _add_label_encoder(config, recipe, directory)
    model = GLiNER.from_config(config, backbone_from_pretrained=False)
    _spread(model)
    config_name = model.config.model_name
    model.config.model_name = "tiny-encoder"
    if recipe.labels is not None:
        model.config.labels_encoder = "tiny-labels-encoder"
    model.save_pretrained(directory / recipe.name, safe_serialization=recipe.safe)
    model.config.model_name = config_name
    return directory / recipe.name


def _add_label_encoder(config: GLiNERConfig, recipe: Recipe, directory: Path) -> None:
    base = directory / f"{recipe.name}-labels-tokenizer"
    train_tokenizer(recipe.labels_tokenizer).save_pretrained(base)
    values = {"vocab_size": 500, **_deberta(recipe.hidden), **(recipe.labels or {})}
    config.labels_encoder = str(base)
    config.labels_encoder_config = AutoConfig.for_model("deberta-v2", **values).to_dict()


def _spread(model: GLiNER) -> None:
    """Redraw the weights until there are entities to compare, and not everything is one."""
    model.eval()
    for _ in range(200):
        _draw(model)
        # One by one: with represent_spans the library finds spans in the padding of a batch, and fails.
        found = sum(len(model.predict_entities(text, LABELS)) for text in TEXTS[:5])
        if found > 10 and (_logits(model) > 0).float().mean() < 0.6:
            return
    raise AssertionError("no draw gave usable scores")


@torch.no_grad()
def _draw(model: GLiNER) -> None:
    for name, parameter in model.model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=(2.0 / parameter.shape[-1]) ** 0.5)
        elif not re.search(r"norm\.weight", name, re.IGNORECASE):
            torch.nn.init.normal_(parameter, std=0.1)
    last = model.model.scorer.out_mlp[-1] if hasattr(model.model, "scorer") else model.model.prompt_rep_layer[-1]
    scale = 2.0 / _logits(model).std()
    last.weight.mul_(scale)
    last.bias.mul_(scale)


def _logits(model: GLiNER) -> torch.Tensor:
    prepared = model.prepare_batch(TEXTS[:2], LABELS)
    batch = model.collate_batch(prepared["input_x"], prepared["entity_types"], model.create_collator())
    output = model.run_batch(batch, move_to_device=True)
    return (output.logits if output.span_logits is None else output.span_logits).flatten()


def load(path: Path) -> GLiNER:
    """The reference model."""
    return GLiNER.from_pretrained(str(path), local_files_only=True).eval()
