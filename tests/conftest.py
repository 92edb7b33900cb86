"""Checkpoints and engines shared by the tests. Everything is built once a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

from checkpoints import V2, V3, Recipe, build, load
from harness import CheckpointLibrary
from vllm_factory.poolers.gliner_config import SPAN_MODES
from vllm_factory.registry import PLUGINS, plugin

# The models are tiny: more threads only wait for each other.
torch.set_num_threads(1)

RECIPES = {
    recipe.name: recipe
    for recipe in [
        Recipe("span-v3"),
        Recipe("span-v3-no-lstm", head={"num_rnn_layers": 0}, seed=1),
        Recipe("span-v3-two-lstm", head={"num_rnn_layers": 2, "max_width": 3}, seed=2, tokenizer="wordpiece"),
        Recipe("span-v2-conv", encoder=V2, seed=3, tokenizer="bpe"),
        Recipe("span-projected", head={"hidden_size": 24, "max_width": 12}, seed=4, safe=False),
        Recipe("span-fused-layers", head={"fuse_layers": True}, seed=5),
        Recipe("span-label-token", head={"embed_ent_token": False}, seed=6),
        Recipe(
            "span-absolute",
            encoder={**V3, "position_biased_input": True, "max_position_embeddings": 200},
            seed=7,
        ),
        *(
            Recipe(f"span-{mode}", head={"subtoken_pooling": mode}, seed=8, tokenizer=tokenizer)
            for mode, tokenizer in (("last", "bpe"), ("mean", "unigram"), ("max", "wordpiece"))
        ),
        *(
            Recipe(f"mode-{mode}", head={"span_mode": mode, "num_rnn_layers": index % 2}, seed=20 + index)
            for index, mode in enumerate(SPAN_MODES)
            if mode != "markerV0"
        ),
        Recipe("token-v3", head={"span_mode": "token_level"}, seed=40),
        Recipe("token-no-lstm", head={"span_mode": "token_level", "num_rnn_layers": 0}, seed=41, tokenizer="bpe"),
        Recipe("token-v2", encoder=V2, head={"span_mode": "token_level"}, seed=42, tokenizer="wordpiece"),
        Recipe("token-spans", head={"span_mode": "token_level", "represent_spans": True}, seed=43),
        Recipe("mmbert-span", "modernbert", hidden=64, tokenizer="bpe", seed=60),
        # Heads of 16, which vLLM's attention on the CPU does not take.
        Recipe("mmbert-small-heads", "modernbert", encoder={"num_attention_heads": 4}, hidden=64, seed=62),
        Recipe(
            "mmbert-token",
            "modernbert",
            encoder={"vocab_size": 700, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
            head={"span_mode": "token_level", "hidden_size": 24},
            hidden=64,
            tokenizer="gemma",
            seed=61,
        ),
        Recipe("linker-span", labels={}, seed=70),
        Recipe("linker-token", head={"span_mode": "token_level"}, labels={"hidden_size": 24}, seed=71, safe=False),
        Recipe(
            "linker-projected",
            encoder=V2,
            head={"hidden_size": 24, "subtoken_pooling": "mean", "num_rnn_layers": 0},
            labels={**V2, "num_hidden_layers": 3},
            tokenizer="bpe",
            labels_tokenizer="bpe",
            seed=72,
        ),
        Recipe(
            "linker-spans",
            head={"span_mode": "token_level", "represent_spans": True},
            labels={"position_biased_input": True, "max_position_embeddings": 40},
            seed=73,
        ),
        Recipe("linker-fused", head={"fuse_layers": True}, labels={}, seed=74),
        Recipe("mt5-span", "mt5", tokenizer="t5", seed=50),
        Recipe("mt5-token", "mt5", head={"span_mode": "token_level"}, tokenizer="t5", seed=51),
        Recipe("mt5-fused-layers", "mt5", head={"fuse_layers": True, "num_rnn_layers": 0}, seed=52),
        Recipe("mt5-pickled", "mt5", head={"hidden_size": 24, "subtoken_pooling": "mean"}, seed=53, safe=False),
        Recipe("t5-relu", "t5", encoder={"d_kv": 5, "num_heads": 3}, tokenizer="t5", seed=54),
        Recipe(
            "t5-gated",
            "t5",
            encoder={"feed_forward_proj": "gated-silu"},
            tokenizer="t5",
            seed=55,
        ),
    ]
}


#: What runs without vLLM, and whose answer in the library does not depend on the padding of its labels.
LOCAL_RECIPES = [
    name for name, recipe in RECIPES.items() if plugin(recipe.plugin).network_class and name != "linker-fused"
]


def named(name: str, *values: Any) -> Any:
    """Parameters of a test about the recipe called ``name``, under its plugin's marker."""
    return pytest.param(name, *values, marks=getattr(pytest.mark, RECIPES[name].plugin))


def each(names: Iterable[str]) -> list[Any]:
    """Recipes as the one parameter of a test."""
    return [named(name) for name in names]


class Library(CheckpointLibrary):
    """The GLiNER checkpoints."""

    def build(self, name: str) -> Path:
        return build(RECIPES[name], self.directory)

    def load(self, path: Path) -> Any:
        return load(path)


def pytest_configure(config: pytest.Config) -> None:
    """One marker a plugin, so that ``make test P=<plugin>`` finds its tests."""
    for spec in PLUGINS:
        config.addinivalue_line("markers", f"{spec.name}: tests of the plugin {spec.name}")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """All checkpoints of the session."""
    return Library(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def gliner2_library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All GLiNER2 checkpoints of the session."""
    from gliner2_harness import Gliner2Library

    return Gliner2Library(tmp_path_factory.mktemp("gliner2"))
