"""Checkpoints as published: dense modules, prompts, and which plugin serves them."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from retrieval_harness import Golden
from vllm_factory.errors import CheckpointError, ServeError
from vllm_factory.poolers.dense_stack import DenseConfig, dense_stack, load_dense_stack
from vllm_factory.published import Published, layout
from vllm_factory.serving.cli import parse
from vllm_factory.serving.plan import make_plan

GOLDEN = Golden("moderncolbert", "attended")
pytestmark = pytest.mark.moderncolbert


@pytest.fixture
def copy(tmp_path: Path) -> Published:
    """A copy of a checkpoint, to be damaged."""
    shutil.copytree(GOLDEN.path, tmp_path / "checkpoint")
    return Published(tmp_path / "checkpoint", "copy")


def rewrite(checkpoint: Published, file: str, **values: Any) -> None:
    path = checkpoint.path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_dense_stack_loads_every_tensor(copy: Published) -> None:
    stack = dense_stack(copy, 64)
    assert stack.out_features == 24
    loaded = load_dense_stack(stack, copy)
    assert loaded == {
        "layers.0.linear.weight",
        "layers.0.linear.bias",
        "layers.0.residual.weight",
        "layers.1.linear.weight",
        "layers.2.linear.weight",
        "layers.2.linear.bias",
    }
    saved = load_file(copy.path / "2_Dense" / "model.safetensors")["linear.weight"]
    torch.testing.assert_close(stack.layers[1].linear.weight.data, saved)


def test_pickled_weights_load_as_well(copy: Published) -> None:
    file = copy.path / "3_Dense" / "model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    want = load_file(file)["linear.weight"]
    file.unlink()
    stack = dense_stack(copy, 64)
    load_dense_stack(stack, copy)
    torch.testing.assert_close(stack.layers[2].linear.weight.data, want)


def test_a_tensor_too_many_is_named(copy: Published) -> None:
    file = copy.path / "2_Dense" / "model.safetensors"
    save_file({**load_file(file), "linear.extra": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=r"2_Dense(.|\n)*linear\.extra"):
        load_dense_stack(dense_stack(copy, 64), copy)


def test_a_tensor_too_few_is_named(copy: Published) -> None:
    file = copy.path / "1_Dense" / "model.safetensors"
    save_file({"linear.weight": load_file(file)["linear.weight"]}, file)
    with pytest.raises(CheckpointError, match=r"1_Dense(.|\n)*residual\.weight"):
        load_dense_stack(dense_stack(copy, 64), copy)


def test_missing_weights_are_named(copy: Published) -> None:
    (copy.path / "1_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1_Dense has no weights"):
        load_dense_stack(dense_stack(copy, 64), copy)


def test_widths_that_do_not_fit_are_named(copy: Published) -> None:
    rewrite(copy, "2_Dense/config.json", in_features=47)
    with pytest.raises(CheckpointError, match="dense module 1 takes 47 features, gets 48"):
        dense_stack(copy, 64)


@pytest.mark.parametrize(
    "values",
    [
        {"activation_function": "os.system"},
        {"activation_function": "torch.nn.modules.linear.NoSuchThing"},
        {"in_features": 0},
        {"out_features": "8"},
        {"gate": True},
        {"module_input_name": "sparse"},
    ],
)
def test_unknown_dense_settings_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(values))):
        DenseConfig.from_dict({"in_features": 4, "out_features": 4, **values}, "1_Dense")


def test_prompts_are_sentence_transformers_s(copy: Published) -> None:
    assert copy.prompts() == {"query": "", "document": ""}
    assert copy.default_prompt() == ""
    rewrite(copy, "config_sentence_transformers.json", prompts={"query": "q: ", "x": "y"}, default_prompt_name="x")
    assert copy.prompts() == {"query": "q: ", "document": "", "x": "y"}
    assert copy.default_prompt() == "y"
    rewrite(copy, "config_sentence_transformers.json", default_prompt_name="z")
    with pytest.raises(CheckpointError, match="default_prompt_name 'z' is no prompt"):
        copy.default_prompt()


@pytest.mark.parametrize("content", ["[]", "{}", "[1]", "not json", '[{"type": "a.Dense", "path": ""}]'])
def test_damaged_module_lists_are_refused(copy: Published, content: str) -> None:
    (copy.path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        copy.modules()


def test_layouts_are_told_apart(copy: Published, tmp_path: Path) -> None:
    assert layout(copy.path) == "colbert"
    rewrite(
        copy, "config_sentence_transformers.json", model_type="SentenceTransformer", similarity_fn_name="cosine"
    )
    assert layout(copy.path) == "colbert", "a dense module and no pooling"
    modules = json.loads((copy.path / "modules.json").read_text())
    modules.insert(1, {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    (copy.path / "modules.json").write_text(json.dumps(modules))
    assert layout(copy.path) == "dense"
    assert layout(tmp_path) is None


def command(*arguments: str) -> list[str]:
    options, _, rest = parse(list(arguments))
    return list(make_plan(options, rest).command)


def value_of(tokens: list[str], flag: str) -> str:
    return tokens[tokens.index(flag) + 1]


def test_serve_finds_the_plugin_and_says_what_the_files_do_not(copy: Published) -> None:
    tokens = command(str(copy.path))
    assert value_of(tokens, "--io-processor-plugin") == "moderncolbert_io"
    assert value_of(tokens, "--runner") == "pooling"
    overrides = json.loads(value_of(tokens, "--hf-overrides"))
    assert overrides == {"architectures": ["VllmFactoryModernColbert"], "model_max_length": 64}
    assert value_of(tokens, "--max-model-len") == "64"
    assert shlex.split(shlex.join(tokens)) == tokens


def test_the_user_s_length_wins_and_overrides_must_hold_ours(copy: Published) -> None:
    assert command(str(copy.path), "--max-model-len", "48").count("--max-model-len") == 1
    with pytest.raises(ServeError, match=r"also needs.*VllmFactoryModernColbert"):
        command(str(copy.path), "--hf-overrides", '{"rope_theta": 1}')
    with pytest.raises(ServeError, match="no JSON object"):
        command(str(copy.path), "--hf-overrides", "architectures")
    ours = '{"architectures": ["VllmFactoryModernColbert"], "model_max_length": 64, "norm_eps": 1e-5}'
    assert command(str(copy.path), "--hf-overrides", ours).count("--hf-overrides") == 1


def test_another_plugin_than_the_files_call_for_is_refused(copy: Published) -> None:
    with pytest.raises(ServeError, match="is a checkpoint for moderncolbert"):
        command(str(copy.path), "--io-processor-plugin", "deberta_gliner")
