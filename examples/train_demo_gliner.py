"""Train the small GLiNER model that ``make demo`` serves.

One command does everything, without network access and from one seed: generate sentences, train a tokenizer
on them, train a GLiNER with the gliner library's own trainer, measure it on held-out sentences and save it in
the library's own layout::

    python examples/train_demo_gliner.py --output examples/demo_gliner

The result is a demonstration: a real GLiNER with real predictions, small enough for a repository.
"""

import argparse
import json
import os
import platform
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

# Nothing here may reach for a hub; the libraries read this when they are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that spin while they wait make a shared machine several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from gliner import GLiNER
from gliner.config import UniEncoderSpanConfig
from gliner.data_processing import WordsSplitter
from gliner.model import UniEncoderSpanGLiNER
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, set_seed

from demo_corpus import (
    ENTITY_TYPES,
    GlinerExample,
    LabelSampler,
    Sentence,
    make_sentences,
    to_gliner,
)

MODEL_NAME: Final = "vllm-factory-demo-encoder"
SPECIAL_TOKENS: Final = {
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}
MAX_SUBTOKENS: Final = 512
THRESHOLD: Final = 0.5
# The held-out set has its own seed, far from those of the training set.
HELD_OUT_SEED_OFFSET: Final = 1_000_003
VERSIONED: Final = ("gliner", "torch", "transformers", "tokenizers", "faker", "safetensors")


@dataclass(frozen=True)
class Options:
    """The command line, parsed."""

    output: Path
    steps: int
    train_size: int
    eval_size: int
    batch_size: int
    learning_rate: float
    vocab_size: int
    seed: int
    threads: int


def parse_options(argv: list[str] | None = None) -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train, evaluate and save the demonstration GLiNER model (no network needed).",
        epilog="A quick look at the whole pipeline: --steps 20 --train-size 200 --output /tmp/demo",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the model; its old files are replaced"
    )
    parser.add_argument("--steps", type=int, default=1400, help="optimizer steps")
    parser.add_argument("--train-size", type=int, default=44_800, help="generated training texts")
    parser.add_argument("--eval-size", type=int, default=600, help="generated held-out texts")
    parser.add_argument("--batch-size", type=int, default=32, help="texts in a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--vocab-size", type=int, default=6000, help="pieces in the tokenizer")
    parser.add_argument("--seed", type=int, default=7, help="seed of the data, the weights and the order")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; another number changes the rounding")
    return Options(**vars(parser.parse_args(argv)))


def training_examples(sentences: list[Sentence], seed: int) -> list[GlinerExample]:
    """Attach sampled labels to the sentences and split them into words as gliner does."""
    sampler, splitter = LabelSampler(seed), WordsSplitter("whitespace")
    return [to_gliner(sentence, sampler.training_labels(sentence), splitter) for sentence in sentences]


def in_even_batches(examples: list[GlinerExample], batch_size: int, seed: int) -> list[GlinerExample]:
    """Order examples so that each batch holds texts of similar length, with the batches shuffled.

    Span scoring pads every text to the longest of its batch, so this more than halves the training time.
    The trainer then reads the list in order.
    """
    by_length = sorted(examples, key=lambda example: len(example["tokenized_text"]))
    batches = [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
    random.Random(seed).shuffle(batches)
    return [example for batch in sorted(batches, key=len, reverse=True) for example in batch]


def tokenizer_lines(examples: Iterable[GlinerExample]) -> Iterable[str]:
    """The text the tokenizer learns from: words as the model will see them, and the labels of the prompts."""
    for example in examples:
        yield " ".join(example["tokenized_text"])
        yield " ".join(example.get("ner_labels", []))


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of DeBERTa-v3's shape: unigram pieces, with a leading mark on every word.

    There is no byte fallback (the trainer of ``tokenizers`` has none): printable Latin characters are always
    in the vocabulary and anything else becomes ``[UNK]``, as the model knows Latin script only.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        unk_token=SPECIAL_TOKENS["unk_token"],
        initial_alphabet=[chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0x180))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS.values()}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_SUBTOKENS,
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )


def encoder_config(vocab_size: int, pad_token_id: int) -> dict[str, Any]:
    """A DeBERTa-v3 encoder in miniature: same attention, three thin layers."""
    return {
        "model_type": "deberta-v2",
        "vocab_size": vocab_size,
        "pad_token_id": pad_token_id,
        "hidden_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 512,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "relative_attention": True,
        "position_buckets": 64,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
        "max_relative_positions": -1,
        "max_position_embeddings": MAX_SUBTOKENS,
        "layer_norm_eps": 1e-7,
    }


def build_model(tokenizer: PreTrainedTokenizerFast) -> UniEncoderSpanGLiNER:
    """Build an untrained GLiNER for the tokenizer; gliner adds its marker tokens and finds their ids."""
    config = UniEncoderSpanConfig(
        model_name=MODEL_NAME,
        name="vllm-factory demonstration",
        span_mode="markerV0",
        hidden_size=96,
        max_width=10,
        max_len=384,
        dropout=0.2,
        num_rnn_layers=1,
        encoder_config=encoder_config(len(tokenizer), tokenizer.pad_token_id),
    )
    model = UniEncoderSpanGLiNER(config, tokenizer=tokenizer, backbone_from_pretrained=False)
    # As ``load_from_config`` does, which would want the tokenizer in a folder named by ``model_name``.
    tokenizer.add_tokens(["[FLERT]", config.ent_token, config.sep_token], special_tokens=True)
    model.resize_embeddings()
    return model


def train(model: UniEncoderSpanGLiNER, examples: list[GlinerExample], options: Options) -> float:
    """Train with gliner's own trainer and return the seconds it took."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = model.create_training_args(
            output_dir=scratch,
            learning_rate=options.learning_rate,
            others_lr=options.learning_rate,
            weight_decay=0.01,
            others_weight_decay=0.01,
            lr_scheduler_type="cosine",
            optim="adamw_torch_fused",
            warmup_ratio=0.08,
            per_device_train_batch_size=options.batch_size,
            max_steps=options.steps,
            logging_steps=max(1, min(50, options.steps // 10)),
            save_strategy="no",
            train_sampling_strategy="sequential",
            use_cpu=True,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            seed=options.seed,
        )
        started = time.perf_counter()
        model.train_model(examples, None, training_args=arguments)
        return time.perf_counter() - started


def save_model(model: UniEncoderSpanGLiNER, output: Path) -> None:
    """Save in gliner's layout with half-precision weights; gliner reads them back as single precision."""
    output.mkdir(parents=True, exist_ok=True)
    model.model.half()
    model.save_pretrained(output, safe_serialization=True)
    _make_tokenizer_portable(output / "tokenizer_config.json")
    # safetensors creates its file readable for the owner only.
    (output / "model.safetensors").chmod(0o644)


def _make_tokenizer_portable(path: Path) -> None:
    """Name the tokenizer class as transformers 4 and 5 both know it and drop what depends on this machine."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "name_or_path", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(path, config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _scores(correct: int, predicted: int, expected: int) -> dict[str, float | int]:
    precision = correct / predicted if predicted else 0.0
    recall = correct / expected if expected else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    rates = {"precision": round(precision, 4), "recall": round(recall, 4), "f1": round(f1, 4)}
    return {**rates, "correct": correct, "predicted": predicted, "expected": expected}


def evaluate(model: GLiNER, sentences: list[Sentence], seed: int) -> dict[str, Any]:
    """Score ``predict_entities`` on sentences: exact spans, every type asked for in every sentence.

    Each sentence is asked with one phrasing for each type, drawn at random, so a model that answers to
    "person" but not to "people" loses points here.
    """
    sampler = LabelSampler(seed)
    correct: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    for sentence in sentences:
        labels = sampler.broad_labels()
        found = {
            (entity["start"], entity["end"], labels[entity["label"]].name)
            for entity in model.predict_entities(sentence.text, list(labels), threshold=THRESHOLD)
        }
        gold = {
            (entity.start, entity.end, entity_type.name)
            for entity in sentence.entities
            for entity_type in ENTITY_TYPES
            if entity.kind in entity_type.kinds
        }
        for counter, spans in ((correct, found & gold), (predicted, found), (expected, gold)):
            counter.update(name for _, _, name in spans)
    names = [entity_type.name for entity_type in ENTITY_TYPES]
    return {
        "overall": _scores(correct.total(), predicted.total(), expected.total()),
        "per_type": {name: _scores(correct[name], predicted[name], expected[name]) for name in names},
    }


def report(options: Options, scores: dict[str, Any], sentences: int, train_seconds: float) -> dict[str, Any]:
    """Put together what ``metrics.json`` records."""
    return {
        "task": "exact-match named entity recognition on generated held-out sentences",
        "threshold": THRESHOLD,
        **scores,
        "train_sentences": options.train_size,
        "held_out_sentences": sentences,
        "steps": options.steps,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "threads": options.threads,
        "train_seconds": round(train_seconds, 1),
        "python": platform.python_version(),
        "versions": {name: version(name).split("+")[0] for name in VERSIONED},
    }


CARD: Final = """# Demonstration GLiNER

A small GLiNER model for the demo of vllm-factory. It is a **demonstration, not a product**: it shows that the
whole path works with real weights and real predictions. For real work take a pretrained GLiNER.

- **Architecture:** GLiNER with one encoder and span scoring (`markerV0`); the encoder is DeBERTa-v3 in
  miniature (3 layers, width 192). {parameters:.2f} million parameters, in half precision ({size:.1f} MB).
- **Training data:** {train_sentences} texts generated from templates, Faker's names in 18 Latin-script
  locales, invented names, and lists of well-known companies, places, events and products. English sentences
  only; no collected text and no pretrained weights were used.
- **Training:** {steps} steps of {batch_size} texts with the trainer of the gliner library, from random
  weights, seed {seed}; {minutes:.0f} minutes on {threads} CPU threads.
- **Tokenizer:** unigram, trained on the same texts. Characters outside Latin script become `[UNK]`.
- **Measured:** micro F1 **{f1:.3f}** (precision {precision:.3f}, recall {recall:.3f}) at threshold
  {threshold}, exact match, on {held_out_sentences} generated texts whose templates and names are not in the
  training set. Those texts are still generated: what people write is harder, so expect less there. Details
  are in `metrics.json`.

| type | precision | recall | F1 | entities |
| --- | ---: | ---: | ---: | ---: |
{rows}

Labels it was trained to understand: person, organization, company, institution, location, city, country,
region, address, date, time, event, product, money, and common synonyms of these. Others give poor results.

```python
from gliner import GLiNER

model = GLiNER.from_pretrained("examples/demo_gliner", local_files_only=True)
text = "Grace Hopper was born in New York on 9 December 1906."
model.predict_entities(text, ["person", "location", "date"])
```

Made with:

```shell
{command}
```
"""


def write_card(output: Path, metrics: dict[str, Any], parameters: int) -> None:
    """Write the model card from the numbers that were measured."""
    rows = "\n".join(
        f"| {name} | {s['precision']:.3f} | {s['recall']:.3f} | {s['f1']:.3f} | {s['expected']} |"
        for name, s in metrics["per_type"].items()
    )
    command = "python examples/train_demo_gliner.py --output examples/demo_gliner"
    for flag, default in (("steps", 1400), ("train_size", 44_800), ("seed", 7)):
        value = metrics["train_sentences" if flag == "train_size" else flag]
        command += "" if value == default else f" --{flag.replace('_', '-')} {value}"
    card = CARD.format(
        **{k: v for k, v in metrics.items() if k not in ("overall", "per_type")},
        **metrics["overall"],
        parameters=parameters / 1e6,
        size=(output / "model.safetensors").stat().st_size / 1e6,
        minutes=metrics["train_seconds"] / 60,
        rows=rows,
        command=command,
    )
    (output / "README.md").write_text(card, encoding="utf-8")


def show_examples(model: GLiNER, path: Path) -> None:
    """Print what the model finds in the hand-written sentences, the check that matters to a reader."""
    for item in json.loads(path.read_text(encoding="utf-8")):
        print(f"\n{item['text']}\n  labels: {', '.join(item['labels'])}")
        for entity in model.predict_entities(item["text"], item["labels"], threshold=THRESHOLD):
            print(f"  {entity['label']:>14}  {entity['score']:.2f}  {entity['text']}")


def main(argv: list[str] | None = None) -> None:
    """Run the pipeline."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    set_seed(options.seed)
    print(f"Generating {options.train_size} training and {options.eval_size} held-out texts ...", flush=True)
    examples = training_examples(make_sentences(options.seed, options.train_size), options.seed)
    held_out_seed = options.seed + HELD_OUT_SEED_OFFSET
    held_out = make_sentences(held_out_seed, options.eval_size, held_out=True)

    print("Training the tokenizer ...", flush=True)
    sample = random.Random(options.seed).sample(examples, min(len(examples), 20_000))
    model = build_model(train_tokenizer(tokenizer_lines(sample), options.vocab_size))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"Training {parameters / 1e6:.2f} million parameters for {options.steps} steps ...", flush=True)
    train_seconds = train(model, in_even_batches(examples, options.batch_size, options.seed), options)

    if options.output.exists():
        shutil.rmtree(options.output)
    save_model(model, options.output)
    # Everything below uses the saved model, so that the numbers are those of the files.
    saved = GLiNER.from_pretrained(str(options.output), local_files_only=True)
    print("Evaluating ...", flush=True)
    metrics = report(options, evaluate(saved, held_out, held_out_seed), len(held_out), train_seconds)
    _write_json(options.output / "metrics.json", metrics)
    write_card(options.output, metrics, parameters)
    print(json.dumps({"overall": metrics["overall"], "per_type": metrics["per_type"]}, indent=2))
    show_examples(saved, Path(__file__).with_name("sentences.json"))


if __name__ == "__main__":
    main()
