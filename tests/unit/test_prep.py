"""vllm-factory-prep: what it writes, what it refuses, and that refusing leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ModernBertConfig

from checkpoints import LABELS, TEXTS
from conftest import RECIPES, Library, each, named
from harness import LocalEngine, assert_same_entities
from vllm_factory.prep.cli import main

Edit = Callable[[Path], None]


def change_config(**changes: object) -> Edit:
    """Set keys of gliner_config.json; ``...`` removes one."""

    def edit(path: Path) -> None:
        file = path / "gliner_config.json"
        config = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return edit


def change_encoder(**changes: object) -> Edit:
    """Set keys of the encoder's part of gliner_config.json."""

    def edit(path: Path) -> None:
        encoder = json.loads((path / "gliner_config.json").read_text())["encoder_config"]
        change_config(encoder_config={**encoder, **changes})(path)

    return edit


def change_weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def apply(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        edit(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def remove(file: str) -> Edit:
    return lambda path: (path / file).unlink()


def write(file: str, content: str) -> Edit:
    def edit(path: Path) -> None:
        (path / file).write_text(content)

    return edit


REFUSED: dict[str, tuple[Edit, str]] = {
    "no gliner_config.json": (remove("gliner_config.json"), "is no checkpoint"),
    "damaged JSON": (write("gliner_config.json", "{"), "gliner_config.json cannot be read as JSON"),
    "not an object": (write("gliner_config.json", "[]"), "expected an object"),
    "no weights": (
        remove("model.safetensors"),
        "no weights; looked for model.safetensors and pytorch_model.bin",
    ),
    "damaged weights": (write("model.safetensors", "nonsense"), "the weights cannot be read"),
    "damaged tokenizer": (write("tokenizer.json", "{}"), "tokenizer files cannot be loaded"),
    "bi-encoder": (
        change_config(labels_encoder="x", labels_encoder_config={"model_type": "bert"}),
        "a GLiNER bi-encoder, 'deberta-v2' for texts and 'bert' for labels; served are",
    ),
    "bi-encoder that names its labels' encoder": (
        change_config(labels_encoder="x", labels_encoder_config=...),
        "gliner_config.json only names its encoder, 'x'",
    ),
    "label decoder": (change_config(labels_decoder="x"), "generative label decoder"),
    "relations": (change_config(relations_layer="x"), "relation extraction model"),
    "streaming": (change_config(model_type="gliner_streaming_span"), "streaming model"),
    "another encoder": (change_config(encoder_config={"model_type": "umt5"}), "a GLiNER on 'umt5'"),
    "compressed prompts": (change_config(precomputed_prompts_mode=True), "precomputed_prompts_mode is set"),
    "context encoder": (
        change_config(span_encoder_config={"model_type": "rnn"}),
        "span_encoder_config is set",
    ),
    "unknown span mode": (change_config(span_mode="token-level"), "span_mode 'token-level'; known are"),
    "encoder only named": (change_config(encoder_config=...), "only names its encoder"),
    "wrong marker id": (change_config(class_token_index=3), "class_token_index 3"),
    "missing tensor": (
        change_weights(lambda t: t.pop("prompt_rep_layer.0.bias")),
        "no tensor fills head.prompt_rep",
    ),
    "tensor too many": (
        change_weights(lambda t: t.update({"extra.x": torch.ones(1)})),
        "no parameter takes extra.x",
    ),
    "wrong shape": (change_config(max_width=7, span_mode="mlp"), "weights and configuration disagree"),
    "encoder contradicts": (
        change_config(encoder_config={"model_type": "deberta-v2", "hidden_size": 32, "num_attention_heads": 5}),
        "not a multiple of num_attention_heads",
    ),
}


BERT_LAYER = "token_rep_layer.bert_layer.model"
REFUSED_MT5: dict[str, tuple[Edit, str]] = {
    "no embeddings": (
        change_weights(lambda t: t.pop(f"{BERT_LAYER}.shared.weight")),
        "the weights hold no shared.weight of the encoder",
    ),
    "untied embeddings": (
        change_weights(lambda t: t.update({f"{BERT_LAYER}.encoder.embed_tokens.weight": torch.ones(3, 3)})),
        "encoder.embed_tokens.weight and shared.weight differ",
    ),
    "a decoder": (
        change_weights(lambda t: t.update({f"{BERT_LAYER}.decoder.final_layer_norm.weight": torch.ones(3)})),
        "no parameter takes backbone.decoder.final_layer_norm.weight",
    ),
    "odd feed-forward": (
        change_encoder(feed_forward_proj="gated-gelu-x"),
        "feed_forward_proj",
    ),
    "unknown activation": (change_encoder(feed_forward_proj="gated-nope"), "'gated-nope'; expected an activation"),
    "a wrong type": (change_encoder(d_model="wide"), "encoder_config: Validation error for field 'd_model'"),
    "one bias a layer": (change_encoder(model_type="umt5"), "a GLiNER on 'umt5', which no plugin serves yet"),
}
REFUSED_MMBERT: dict[str, tuple[Edit, str]] = {
    "fused layers": (change_config(fuse_layers=True), "fuse_layers is set (a weighted sum of all layers"),
    "missing tensor": (
        change_weights(lambda t: t.pop(f"{BERT_LAYER}.layers.1.attn_norm.weight")),
        "no tensor fills backbone.layers.1.attn_norm.weight",
    ),
    "tensor too many": (
        change_weights(lambda t: t.update({f"{BERT_LAYER}.layers.0.attn_norm.weight": torch.ones(64)})),
        "no parameter takes backbone.layers.0.attn_norm.weight",
    ),
    "wrong shape": (change_encoder(intermediate_size=96), "weights and configuration disagree"),
    "missing bias": (change_encoder(mlp_bias=True), "no tensor fills backbone.layers.0.mlp"),
}


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


REFUSALS = {
    **{f"span-v3 {what}": named("span-v3", *case) for what, case in REFUSED.items()},
    **{f"mmbert-span {what}": named("mmbert-span", *case) for what, case in REFUSED_MMBERT.items()},
    **{f"mt5-span {what}": named("mt5-span", *case) for what, case in REFUSED_MT5.items()},
}


@pytest.mark.parametrize(("name", "edit", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refused_with_status_2_and_nothing_written(
    name: str, edit: Edit, message: str, library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(library.saved(name), checkpoint)
    edit(checkpoint)
    assert run("--model", checkpoint, "--output", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.deberta_gliner
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/directory", "there is no such directory"),
        ("no-such-owner/no-such-model", "the hub did not give it"),
        ("a b c!", "neither a directory nor a hub id"),
    ],
)
def test_models_that_are_nowhere(
    model: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", model, "--output", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", each(["span-v3", "mmbert-span", "mt5-span"]))
def test_a_hub_checkpoint_is_prepared_from_the_cache(
    name: str, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub layout: an id, its snapshot in huggingface_hub's cache, no network."""
    repo = tmp_path / "hub" / "models--acme--tiny-gliner"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(library.saved(name), repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert run("--model", "acme/tiny-gliner", "--output", tmp_path / "out") == 0
    factory = json.loads((tmp_path / "out" / "config.json").read_text())["factory"]
    assert factory["prepared_from"] == "acme/tiny-gliner"
    assert factory["plugin"] == RECIPES[name].plugin


@pytest.mark.deberta_gliner
def test_output_rules(library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = library.saved("span-v3"), tmp_path / "out"
    assert run("--model", source, "--output", output) == 0
    assert capsys.readouterr().out.strip() == str(output)
    assert run("--model", source, "--output", output) == 2
    assert "--force writes it anew" in capsys.readouterr().err
    assert run("--model", source, "--output", output, "--force") == 0
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    assert run("--model", source, "--output", foreign, "--force") == 2
    assert (foreign / "thesis.tex").read_text() == "years of work"
    assert run("--model", output, "--output", tmp_path / "again") == 2
    assert "already prepared" in capsys.readouterr().err


@pytest.mark.deberta_gliner
def test_a_failing_force_keeps_the_earlier_output(library: Library, tmp_path: Path) -> None:
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "out"
    shutil.copytree(library.saved("span-v3"), checkpoint)
    assert run("--model", checkpoint, "--output", output) == 0
    before = (output / "config.json").read_bytes()
    remove("model.safetensors")(checkpoint)
    assert run("--model", checkpoint, "--output", output, "--force") == 2
    assert (output / "config.json").read_bytes() == before


@pytest.mark.deberta_gliner
def test_the_prepared_directory_needs_nothing_else(library: Library, tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "out"
    shutil.copytree(library.saved("token-v3"), source)
    assert run("--model", source, "--output", output) == 0
    shutil.rmtree(source)
    want = library.reference("token-v3").predict_entities(TEXTS[0], LABELS)
    assert_same_entities(LocalEngine(output).answer(text=TEXTS[0], labels=LABELS), want)
    config = (output / "config.json").read_text()
    assert str(tmp_path) not in config


@pytest.mark.deberta_gliner
def test_an_old_checkpoint_leaves_the_markers_to_the_loader(library: Library, tmp_path: Path) -> None:
    """Before the library saved class_token_index and vocab_size, it added the markers at each load."""
    checkpoint = tmp_path / "old"
    shutil.copytree(library.saved("span-v3"), checkpoint)
    change_config(class_token_index=-1, vocab_size=-1)(checkpoint)
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    markers = ("[FLERT]", "<<ENT>>", "<<SEP>>")
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] not in markers]
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        key: value
        for key, value in config.get("added_tokens_decoder", {}).items()
        if value["content"] not in markers
    }
    config["extra_special_tokens"] = []
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    assert run("--model", checkpoint, "--output", tmp_path / "out") == 0
    want = library.reference("span-v3").predict_entities(TEXTS[0], LABELS)
    assert_same_entities(LocalEngine(tmp_path / "out").answer(text=TEXTS[0], labels=LABELS), want)


@pytest.mark.deberta_gliner
def test_half_precision_weights_stay_half(library: Library, tmp_path: Path) -> None:
    checkpoint = tmp_path / "half"
    shutil.copytree(library.saved("span-v3"), checkpoint)
    change_weights(lambda t: t.update({k: v.half() for k, v in t.items()}))(checkpoint)
    assert run("--model", checkpoint, "--output", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.deberta_gliner
def test_pickled_weights_are_read_without_running_code(library: Library, tmp_path: Path) -> None:
    class Malice:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(library.saved("span-projected"), checkpoint)
    torch.save({"x": Malice()}, checkpoint / "pytorch_model.bin")
    assert run("--model", checkpoint, "--output", tmp_path / "out") == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.mt5_gliner
@pytest.mark.parametrize("names", [("shared",), ("encoder.embed_tokens",), ("shared", "encoder.embed_tokens")])
def test_tied_embeddings_are_found_under_either_name(
    names: tuple[str, ...], library: Library, tmp_path: Path
) -> None:
    def tie(tensors: dict[str, torch.Tensor]) -> None:
        embeddings = tensors.pop(f"{BERT_LAYER}.shared.weight")
        tensors.update({f"{BERT_LAYER}.{name}.weight": embeddings.clone() for name in names})

    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(library.saved("mt5-span"), checkpoint)
    change_weights(tie)(checkpoint)
    assert run("--model", checkpoint, "--output", tmp_path / "out") == 0
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = load_file(library.prepared("mt5-span") / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.mmbert_gliner
def test_modernbert_s_configuration_survives_preparation(library: Library) -> None:
    """Layer types, both thetas and the window, as transformers reads them back."""
    saved = json.loads((library.saved("mmbert-span") / "gliner_config.json").read_text())["encoder_config"]
    prepared = json.loads((library.prepared("mmbert-span") / "config.json").read_text())
    backbone = ModernBertConfig(**prepared["factory"]["backbone"])
    want = ModernBertConfig(**{**saved, "vocab_size": backbone.vocab_size})
    for key in ("layer_types", "rope_parameters", "sliding_window", "max_position_embeddings", "norm_eps"):
        assert getattr(backbone, key) == getattr(want, key)
    assert prepared["max_position_embeddings"] == 512


@pytest.mark.mmbert_gliner
def test_modernbert_s_older_keys_are_understood(library: Library, tmp_path: Path) -> None:
    """Before version 5, transformers saved a rhythm of global layers and two thetas."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(library.saved("mmbert-span"), checkpoint)
    saved = json.loads((checkpoint / "gliner_config.json").read_text())["encoder_config"]
    encoder = {key: value for key, value in saved.items() if key not in ("layer_types", "rope_parameters")}
    encoder |= {"global_attn_every_n_layers": 2, "global_rope_theta": 1.6e5, "local_rope_theta": 1.2e5}
    change_config(encoder_config=encoder)(checkpoint)
    assert run("--model", checkpoint, "--output", tmp_path / "out") == 0
    backbone = json.loads((tmp_path / "out" / "config.json").read_text())["factory"]["backbone"]
    assert backbone["layer_types"] == ["full_attention", "sliding_attention"] * 2
    thetas = {kind: rope["rope_theta"] for kind, rope in backbone["rope_parameters"].items()}
    assert thetas == {"full_attention": 1.6e5, "sliding_attention": 1.2e5}
