"""vllm-factory-prep for checkpoints of the gliner2 library: what it writes and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import TEXTS
from gliner2_checkpoints import SCHEMA
from gliner2_harness import Gliner2Engine, Gliner2Library, assert_same_result, library_answer
from vllm_factory.prep.cli import main

pytestmark = pytest.mark.deberta_gliner2

Edit = Callable[[Path], None]


def change(file: str, **changes: object) -> Edit:
    """Set keys of a JSON file; ``...`` removes one."""

    def edit(path: Path) -> None:
        config = {**json.loads((path / file).read_text()), **changes}
        (path / file).write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    return edit


def weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def apply(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")

    return apply


def adapter_alone(path: Path) -> None:
    for file in path.iterdir():
        if file.is_file():
            file.unlink()
    (path / "adapter_config.json").write_text("{}")


REFUSED: dict[str, tuple[Edit, str]] = {
    "boundary": (change("config.json", architecture="boundary"), "the boundary architecture (GLiNER2.5)"),
    "another architecture": (change("config.json", architecture="x"), "a gliner2 checkpoint of 'x'"),
    "another encoder": (change("encoder_config/config.json", model_type="bert"), "a GLiNER2 on 'bert'"),
    "an adapter": (adapter_alone, "is a LoRA adapter alone; merge it"),
    "adapter weights": (
        weights(lambda t: t.update({"encoder.layer.0.lora_A.weight": torch.ones(1)})),
        "no parameter takes backbone.layer.0.lora_A.weight",
    ),
    "counting layer": (change("config.json", counting_layer="x"), "counting_layer 'x'; known are count_lstm"),
    "another counting layer": (
        change("config.json", counting_layer="count_lstm_v2"),
        "no tensor fills head.count_embed.transformer",
    ),
    "span mode": (change("config.json", span_head={"span_mode": "conv"}), "span_mode 'conv'"),
    "no encoder": (lambda path: shutil.rmtree(path / "encoder_config"), "encoder_config/config.json is missing"),
    "damaged tokenizer": (change("tokenizer.json", model=...), "tokenizer files cannot be loaded"),
    "missing tensor": (weights(lambda t: t.pop("count_pred.0.bias")), "no tensor fills head.count_pred.0.bias"),
    "too few embeddings": (
        weights(lambda t: t.update({EMBEDDINGS: t[EMBEDDINGS][:100]})),
        "the embeddings 100",
    ),
    "another model": (
        change("config.json", model_type="bert", counting_layer=...),
        "model_type 'bert'; prepared are",
    ),
}
EMBEDDINGS = "encoder.embeddings.word_embeddings.weight"


@pytest.mark.parametrize(("edit", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_with_status_2_and_nothing_written(
    edit: Edit, message: str, gliner2_library: Gliner2Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(gliner2_library.saved("lstm"), checkpoint)
    edit(checkpoint)
    assert main(["--model", str(checkpoint), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def old_layout(path: Path) -> None:
    """As older versions saved: no architecture, ``max_width`` at the top, markers left to the loader."""
    change("config.json", architecture=..., span_head=..., config_version=..., max_width=5)(path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["id"] < 5]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    change("tokenizer_config.json", added_tokens_decoder=..., extra_special_tokens=[])(path)


EDITS: dict[str, Edit] = {
    "as saved": change("config.json"),
    "old layout": old_layout,
    "more embeddings": weights(
        lambda t: t.update({EMBEDDINGS: torch.cat([t[EMBEDDINGS], torch.zeros(7, t[EMBEDDINGS].shape[1])])})
    ),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_prepared_equals_the_library_and_needs_nothing_else(
    edit: Edit, gliner2_library: Gliner2Library, tmp_path: Path
) -> None:
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "out"
    shutil.copytree(gliner2_library.saved("lstm"), checkpoint)
    edit(checkpoint)
    assert main(["--model", str(checkpoint), "--output", str(output)]) == 0
    shutil.rmtree(checkpoint)
    data = {"text": TEXTS[0], "schema": SCHEMA, "include_confidence": True}
    want = library_answer(gliner2_library.reference("lstm"), data)
    assert_same_result(Gliner2Engine(output).answer(**data), want)
    assert str(tmp_path) not in (output / "config.json").read_text()


def test_hub_layout(gliner2_library: Gliner2Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id that is in huggingface_hub's cache, no network."""
    repo, commit = tmp_path / "hub" / "models--acme--tiny-gliner2", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(gliner2_library.saved("lstm-v2"), repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["--model", "acme/tiny-gliner2", "--output", str(tmp_path / "out")]) == 0
    factory = json.loads((tmp_path / "out" / "config.json").read_text())["factory"]
    assert (factory["plugin"], factory["prepared_from"]) == ("deberta_gliner2", "acme/tiny-gliner2")
