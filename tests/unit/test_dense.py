"""Embedding requests without vLLM: prompts, tokens, bad input, readable responses, and the files behind them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval_harness import Golden, decoded
from vllm_factory.errors import CheckpointError, RequestError
from vllm_factory.io.dense import DensePipeline, DenseSettings
from vllm_factory.io.limits import Limits
from vllm_factory.poolers.embedding import embedding_pooler
from vllm_factory.published import Published
from vllm_factory.serving.cli import parse
from vllm_factory.serving.plan import make_plan

MEAN, JOINED, NO_PROMPT = (Golden("embeddinggemma", name) for name in ("mean", "joined", "no-prompt"))
pytestmark = pytest.mark.embeddinggemma


def pipeline(golden: Golden = MEAN, limits: Limits | None = None, max_tokens: int = 256) -> DensePipeline:
    width = golden.published.json("config.json")["hidden_size"]
    return DensePipeline.read(str(golden.path), None, width, max_tokens, limits or Limits())


@pytest.fixture
def copy(tmp_path: Path) -> Published:
    """A copy of a checkpoint, to be damaged."""
    shutil.copytree(MEAN.path, tmp_path / "checkpoint")
    return Published(tmp_path / "checkpoint", "copy")


def rewrite(checkpoint: Published, file: str, **values: Any) -> None:
    path = checkpoint.path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def tokens(reads: DensePipeline, **data: Any) -> list[int]:
    return reads.encode(reads.parse(data)).prompts[0].token_ids


@pytest.mark.parametrize(
    ("golden", "data", "prompt"),
    [
        (MEAN, {}, ""),
        (MEAN, {"is_query": True}, "task: search result | query: "),
        (MEAN, {"is_query": False}, "title: none | text: "),
        (MEAN, {"prompt_name": "Clustering"}, "task: clustering | query: "),
        (MEAN, {"prompt_name": "Clustering", "is_query": True}, "task: clustering | query: "),
        (MEAN, {"prompt": "custom: ", "is_query": True}, "custom: "),
        (JOINED, {}, "passage: "),
        (JOINED, {"is_query": True}, ""),
        (JOINED, {"is_query": False}, ""),
        (JOINED, {"prompt": ""}, ""),
        (NO_PROMPT, {}, "task: clustering | query: "),
    ],
)
def test_the_prompt_is_the_one_asked_for(golden: Golden, data: dict[str, Any], prompt: str) -> None:
    reads = pipeline(golden)
    assert tokens(reads, text="Tim Cook", **data) == tokens(reads, text=f"{prompt}Tim Cook", prompt="")


@pytest.mark.parametrize("golden", [MEAN, JOINED, NO_PROMPT], ids=lambda golden: golden.name)
def test_a_prompt_is_left_out_of_the_pooling_where_the_files_say_so(golden: Golden) -> None:
    reads = pipeline(golden)
    encoded = reads.encode(reads.parse({"text": "Tim Cook", "prompt": "custom: ", "dimensions": 3}))
    (about,) = encoded.prompts[0].arrays
    before = len(reads.tokenizer.encode("custom:", 256).ids) - 1  # without the end token
    assert about.tolist() == [3, len(encoded.prompts[0].token_ids), 0 if golden is MEAN else before]
    (bare,) = reads.encode(reads.parse({"text": "Tim Cook", "prompt": ""})).prompts[0].arrays
    assert bare[2] == 0


def test_texts_are_cut_where_the_files_or_the_server_say() -> None:
    for reads, longest in ((pipeline(), 64), (pipeline(max_tokens=20), 20), (pipeline(JOINED), 40)):
        encoded = reads.encode(reads.parse({"text": ["word " * 100, "word", ""], "prompt": ""}))
        lengths = [len(prompt.token_ids) for prompt in encoded.prompts]
        assert lengths[0] == longest
        assert encoded.prompts[0].token_ids[-1] == encoded.prompts[1].token_ids[-1], "the end token stays"
        results = [(np.array([2], np.int32), np.array([3, 4], np.float32))] * 3
        response = reads.decode(encoded.state, results, sum(lengths))
        assert [item["truncated"] for item in response["embeddings"]] == [True, False, False]
        assert [item["tokens"] for item in response["embeddings"]] == lengths
        assert response["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}


@pytest.mark.parametrize("output", ["float", "base64"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_responses_are_read_by_numpy_alone(output: str, dtype: str) -> None:
    reads = pipeline()
    encoded = reads.encode(reads.parse({"text": "one", "output": output, "dtype": dtype}))
    vector = np.linspace(-1, 1, 24, dtype=np.float32)
    item = reads.decode(encoded.state, [(np.array([24], np.int32), vector)], 3)["embeddings"]
    assert item["shape"] == [24]
    assert item["dtype"] == dtype
    np.testing.assert_allclose(decoded(item), vector, atol=5e-3)


GOOD: dict[str, Any] = {"text": "one"}
#: What a client may send, and what the message must say.
BAD: list[tuple[Any, str]] = [
    (None, "data: None; expected an object with text"),
    ([], "expected an object with text"),
    ({}, "text: the field is required"),
    ({"text": None}, "text: expected a string or a list of strings"),
    ({"text": []}, "text: an empty list"),
    ({"text": ["a", 3]}, "text[1]: expected a string"),
    ({"text": "\ud800"}, "text: not valid Unicode"),
    ({"text": ["a"] * 9}, "text: 9 texts; one request takes 8"),
    ({"text": "a" * 2001}, "text: 2001 characters; one request takes 2000"),
    ({**GOOD, "image": "data:"}, "image: unknown field"),
    ({**GOOD, "pool_factor": 2}, "pool_factor: unknown field"),
    ({"query": "a", "documents": ["b"]}, "text: the field is required"),
    ({**GOOD, "is_query": "yes"}, "is_query: expected true or false"),
    ({**GOOD, "output": "hex"}, "output:"),
    ({**GOOD, "dtype": "float64"}, "dtype:"),
    ({**GOOD, "dimensions": 0}, "dimensions:"),
    ({**GOOD, "dimensions": -1}, "dimensions:"),
    ({**GOOD, "dimensions": 25}, "dimensions: 25; this checkpoint's vectors have 24"),
    ({**GOOD, "dimensions": True}, "dimensions: expected a whole number"),
    ({**GOOD, "dimensions": "8"}, "dimensions: expected a whole number"),
    ({**GOOD, "dimensions": 8.5}, "dimensions: expected a whole number"),
    ({**GOOD, "prompt_name": "nope"}, "prompt_name: 'nope'; this checkpoint has: 'Clustering', 'document',"),
    ({**GOOD, "prompt_name": "query", "prompt": "x"}, "prompt_name: given together with prompt"),
    ({**GOOD, "prompt": 3}, "prompt:"),
    ({**GOOD, "prompt": "\ud800"}, "prompt: not valid Unicode"),
    ({**GOOD, "prompt": "a" * 2001}, "prompt: 2001 characters"),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=[f"{i}-{m[:24]}" for i, (_, m) in enumerate(BAD)])
def test_bad_requests_are_refused_with_the_field(data: Any, message: str) -> None:
    reads = pipeline(limits=Limits(max_chars=2000, max_texts=8))
    with pytest.raises(RequestError) as error:
        reads.parse(data)
    assert message in str(error.value)


def test_a_text_without_a_token_of_its_own_is_refused(copy: Published) -> None:
    """A tokenizer without an end token leaves nothing of an empty text behind a prompt that is not pooled."""
    rewrite(copy, "1_Pooling/config.json", include_prompt=False)
    file = copy.path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"]["single"] = [
        step for step in content["post_processor"]["single"] if step.get("SpecialToken", {}).get("id") != "<eos>"
    ]
    file.write_text(json.dumps(content))
    rewrite(copy, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    reads = DensePipeline.read(str(copy.path), None, 48, 256, Limits())
    assert len(tokens(reads, text="Tim", prompt="custom: ")) > 2
    with pytest.raises(RequestError, match=r"text\[1\]: '' has no token to pool"):
        reads.encode(reads.parse({"text": ["Tim", ""], "prompt": "custom: "}))


@pytest.mark.parametrize("value", [0, -1, "64", True, 6.4])
def test_a_length_that_is_none_is_refused(copy: Published, value: Any) -> None:
    rewrite(copy, "sentence_bert_config.json", max_seq_length=value)
    with pytest.raises(CheckpointError, match="max_seq_length is"):
        DenseSettings.read(copy, 48)


@pytest.mark.parametrize(
    "kinds",
    [
        ["Transformer", "Dense", "Pooling"],
        ["Transformer", "Pooling", "LSTM", "Dense"],
        ["Transformer", "Pooling", "Normalize", "Dense"],
        ["Transformer", "Pooling", "Pooling"],
    ],
)
def test_modules_that_are_not_known_are_refused(copy: Published, kinds: list[str]) -> None:
    modules = [{"type": f"a.{kind}", "path": f"{i}_{kind}" if i else ""} for i, kind in enumerate(kinds)]
    (copy.path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=", ".join(kinds)):
        embedding_pooler(copy, 48)


def test_serve_finds_the_plugin() -> None:
    options, _, rest = parse([str(MEAN.path)])
    command = list(make_plan(options, rest).command)
    assert command[command.index("--io-processor-plugin") + 1] == "embeddinggemma_io"
    overrides = json.loads(command[command.index("--hf-overrides") + 1])
    assert overrides == {"architectures": ["VllmFactoryEmbeddingGemma"]}
