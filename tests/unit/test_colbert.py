"""ColBERT without vLLM: tokens equal PyLate's, requests are checked, responses are readable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval_harness import COLBERTS, Golden, decoded, each
from vllm_factory.errors import CheckpointError, RequestError
from vllm_factory.io import token_pooling
from vllm_factory.io.colbert import ColbertPipeline, ColbertSettings, Expansion, longest_prompt
from vllm_factory.io.limits import Limits
from vllm_factory.poolers.multivector import Role
from vllm_factory.published import Published

GOLDENS = [golden for golden in COLBERTS if golden.plugin == "moderncolbert"]
LFM2 = {golden.name: golden for golden in COLBERTS if golden.plugin == "lfm2_colbert"}
pytestmark = [pytest.mark.moderncolbert, pytest.mark.lfm2_colbert]


def pipeline(golden: Golden = GOLDENS[0], limits: Limits | None = None, max_tokens: int = 512) -> ColbertPipeline:
    return ColbertPipeline.read(str(golden.path), None, max_tokens, limits or Limits())


@pytest.mark.parametrize("golden", each(*COLBERTS))
def test_tokens_are_pylate_s(golden: Golden) -> None:
    reads = pipeline(golden)
    cases = golden.cases(pool_factor=1)
    assert len(cases) > 10
    for case in cases:
        data = {"text": case["text"], "is_query": case["is_query"], "prompt_name": case["prompt_name"]}
        encoded = reads.encode(reads.parse(data))
        want = golden.arrays()[f"{case['key']}_ids"]
        np.testing.assert_array_equal(encoded.prompts[0].token_ids, want, case["key"])
        kept = len(want) - encoded.prompts[0].arrays[1].size
        assert kept == golden.arrays()[case["key"]].shape[0], case["key"]


def test_documents_are_cut_where_the_server_s_prompts_end() -> None:
    reads = pipeline(max_tokens=40)
    data = {"text": ["word " * 100, "word"]}
    encoded = reads.encode(reads.parse(data))
    assert len(encoded.prompts[0].token_ids) == 40
    assert encoded.prompts[0].token_ids[:2] == encoded.prompts[1].token_ids[:2]
    vectors = [np.ones((3, 2), np.float32)] * 2
    results = [(np.array(v.shape, np.int32), v.ravel()) for v in vectors]
    items = reads.decode(encoded.state, results, 45)["embeddings"]
    assert [item["truncated"] for item in items] == [True, False]


GOOD_TEXT: dict[str, Any] = {"text": "one"}
GOOD_RANK: dict[str, Any] = {"query": "one", "documents": ["two", "three"]}
#: What a client may send, and what the message must say.
BAD: list[tuple[Any, str]] = [
    (None, "data: None; expected an object"),
    ("text", "expected an object with text, or query and documents"),
    ({}, "text: the field is required"),
    ({"text": None}, "text: expected a string or a list of strings"),
    ({"text": 3}, "text: expected a string or a list of strings"),
    ({"text": []}, "text: an empty list"),
    ({"text": ["a", 3]}, "text[1]: expected a string"),
    ({"text": "\ud800"}, "text: not valid Unicode"),
    ({"text": ["a", "\ud800"]}, "text[1]: not valid Unicode"),
    ({"text": ["a"] * 9}, "text: 9 texts; one request takes 8"),
    ({"text": "a" * 2001}, "text: 2001 characters; one request takes 2000"),
    ({**GOOD_TEXT, "image": "data:"}, "image: unknown field"),
    ({**GOOD_TEXT, "labels": []}, "labels: unknown field; known are"),
    ({**GOOD_TEXT, "is_query": "yes"}, "is_query: expected true or false"),
    ({**GOOD_TEXT, "is_query": 1}, "is_query: expected true or false"),
    ({**GOOD_TEXT, "output": "hex"}, "output:"),
    ({**GOOD_TEXT, "dtype": "float64"}, "dtype:"),
    ({**GOOD_TEXT, "pool_factor": 0}, "pool_factor:"),
    ({**GOOD_TEXT, "pool_factor": 65}, "pool_factor:"),
    ({**GOOD_TEXT, "pool_factor": 1.5}, "pool_factor: expected a whole number"),
    ({**GOOD_TEXT, "pool_factor": True}, "pool_factor: expected a whole number"),
    ({**GOOD_TEXT, "pool_factor": "2"}, "pool_factor: expected a whole number"),
    ({**GOOD_TEXT, "pool_factor": 2, "is_query": True}, "pool_factor: 2 with is_query"),
    ({**GOOD_TEXT, "dimensions": 4}, "dimensions: unknown field"),
    ({**GOOD_TEXT, "prompt_name": "nope"}, "prompt_name: 'nope'; this checkpoint has: 'document', 'query'"),
    ({**GOOD_TEXT, "prompt_name": 1}, "prompt_name:"),
    ({**GOOD_TEXT, "prompt_name": "query", "prompt": "x"}, "prompt_name: given together with prompt"),
    ({**GOOD_TEXT, "prompt": "\ud800"}, "prompt: not valid Unicode"),
    ({**GOOD_TEXT, "prompt": "a" * 2001}, "prompt: 2001 characters"),
    ({"query": "one"}, "documents: the field is required"),
    ({"documents": ["one"]}, "query: the field is required"),
    ({**GOOD_RANK, "query": ["one"]}, "query: expected a string"),
    ({**GOOD_RANK, "query": "\ud800"}, "query: not valid Unicode"),
    ({**GOOD_RANK, "documents": "two"}, "documents:"),
    ({**GOOD_RANK, "documents": []}, "documents: an empty list"),
    ({**GOOD_RANK, "documents": ["two", None]}, "documents[1]: expected a string"),
    ({**GOOD_RANK, "documents": ["two", "\ud800"]}, "documents[1]: not valid Unicode"),
    ({**GOOD_RANK, "documents": ["a"] * 9}, "documents: 9 documents; one request takes 8"),
    ({**GOOD_RANK, "documents": ["a" * 1000, "b" * 1000]}, "documents: 2003 characters with the query"),
    ({**GOOD_RANK, "top_n": 0}, "top_n:"),
    ({**GOOD_RANK, "top_n": "1"}, "top_n: expected a whole number"),
    ({**GOOD_RANK, "similarity": "yes"}, "similarity: expected true or false"),
    ({**GOOD_RANK, "text": "one"}, "text: unknown field; known are"),
    ({**GOOD_RANK, "query_prompt_name": "nope"}, "query_prompt_name: 'nope'"),
    ({**GOOD_RANK, "document_prompt_name": "nope"}, "document_prompt_name: 'nope'"),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=[f"{i}-{m[:24]}" for i, (_, m) in enumerate(BAD)])
def test_bad_requests_are_refused_with_the_field(data: Any, message: str) -> None:
    reads = pipeline(limits=Limits(max_chars=2000, max_texts=8))
    with pytest.raises(RequestError) as error:
        reads.parse(data)
    assert message in str(error.value)


def test_similarities_are_bounded() -> None:
    reads = pipeline(limits=Limits(max_similarities=32 * 10))
    small = {**GOOD_RANK, "documents": ["a"] * 8, "similarity": True}
    with pytest.raises(RequestError, match="similarity: up to 1024 numbers; one request takes 320"):
        reads.encode(reads.parse(small))
    assert len(reads.encode(reads.parse({**small, "top_n": 2})).prompts) == 9


def test_pooling_without_scipy_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_pooling, "available", lambda: False)
    with pytest.raises(RequestError, match=r"vllm-factory\[retrieval\]"):
        pipeline().parse({"text": "one", "pool_factor": 2})


@pytest.mark.parametrize("text", ["", "   ", "\u200b", "\x00"])
def test_a_text_without_words_is_its_special_tokens(text: str) -> None:
    reads = pipeline()
    for is_query in (False, True):
        encoded = reads.encode(reads.parse({"text": text, "is_query": is_query}))
        assert len(encoded.prompts[0].token_ids) >= 3


def test_query_and_documents_of_one_ranking_share_a_key_of_their_own() -> None:
    reads = pipeline()
    keys = []
    for _ in range(2):
        prompts = reads.encode(reads.parse(GOOD_RANK)).prompts
        assert [prompt.arrays[0][0] for prompt in prompts] == [Role.QUERY, Role.DOCUMENT, Role.DOCUMENT]
        (key,) = {int(prompt.arrays[0][1]) for prompt in prompts}
        keys.append(key)
    assert keys[0] != keys[1]


def test_rankings_are_sorted_and_ties_stay_in_order() -> None:
    reads = pipeline()
    request = reads.parse({**GOOD_RANK, "documents": list("abcd"), "top_n": 3, "return_documents": True})
    state = reads.encode(request).state
    query = (np.array([2, 2], np.int32), np.eye(2, dtype=np.float32).ravel())
    empty = np.array([], np.int32)
    # The second document's query was elsewhere: its vectors came back.
    results = [
        query,
        (empty, np.array([0.5], np.float32)),
        (np.array([1, 2], np.int32), np.array([1, 1], np.float32)),
        (empty, np.array([2.0], np.float32)),
        (empty, np.array([0.5], np.float32)),
    ]
    response = reads.decode(state, results, 12)
    assert [(r["index"], r["score"], r["document"]) for r in response["results"]] == [
        (1, 2.0, "b"),
        (2, 2.0, "c"),
        (0, 0.5, "a"),
    ]
    assert response["usage"] == {"prompt_tokens": 12, "total_tokens": 12}


@pytest.mark.parametrize("text", ["  Who RUNS Apple?", "İstanbul'da", "I 💛 it", "ΣΊΣΥΦΟΣ"])
def test_tokens_of_similarities_lie_in_the_text_that_was_sent(text: str) -> None:
    reads = pipeline(GOLDENS[1])
    assert reads.writer.settings.lower
    data = {"query": text, "documents": [text], "similarity": True, "document_prompt_name": "document"}
    reads.prompts["document"] = " a Prompt: "
    encoded = reads.encode(reads.parse(data))
    results = []
    for prompt in encoded.prompts:
        rows = len(prompt.token_ids) - prompt.arrays[1].size
        results.append((np.array([rows, 2], np.int32), np.ones(2 * rows, np.float32)))
    response = reads.decode(encoded.state, results, 0)
    result = response["results"][0]
    assert decoded(result["similarity"]).shape == (len(response["query"]["tokens"]), len(result["tokens"]))
    for tokens in (response["query"]["tokens"], result["tokens"]):
        placed = [token for token in tokens if token["start"] is not None]
        covered = {i for token in placed for i in range(token["start"], token["end"])}
        assert all(token["text"] == text[token["start"] : token["end"]] for token in placed)
        visible = {i for i, character in enumerate(text) if not character.isspace()}
        assert visible <= covered <= set(range(len(text))), "every character has its token"
    assert [t["text"] for t in result["tokens"]][:2] == ["[CLS]", "[unused1]"]


def changed(tmp_path: Path, file: str, **values: Any) -> Published:
    """A copy of a golden checkpoint with other settings in one of its files."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(GOLDENS[0].path, copy)
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps({**content, **values}))
    return Published(copy, "copy")


SETTINGS = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    "values",
    [{"query_length": "32"}, {"document_length": 0}, {"do_query_expansion": 1}, {"skiplist_words": "."}],
)
def test_settings_of_another_type_stop_the_start(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(values))):
        ColbertSettings.read(changed(tmp_path, SETTINGS, **values))


def test_a_prefix_that_is_no_token_stops_the_start(tmp_path: Path) -> None:
    checkpoint = changed(tmp_path, SETTINGS, query_prefix="[query]")
    with pytest.raises(CheckpointError, match=r"query_prefix '\[query\]' is no token"):
        ColbertPipeline.read(str(checkpoint.path), None, 512, Limits())


def test_a_server_too_short_for_queries_stops_the_start() -> None:
    with pytest.raises(
        CheckpointError, match=r"query_length is 32, the server takes 31 tokens.*--max-model-len 48"
    ):
        pipeline(max_tokens=31)


def test_the_longest_prompt_is_pylate_s_and_within_the_positions(tmp_path: Path) -> None:
    assert longest_prompt(GOLDENS[0].published) == 48
    assert longest_prompt(changed(tmp_path, SETTINGS, document_length=9999)) == 512


@pytest.mark.parametrize(
    ("golden", "expansion"),
    [
        (GOLDENS[0], Expansion(4, spared=0, ends_text=False)),
        (LFM2["hidden"], Expansion(3, spared=0, ends_text=True)),
        (LFM2["ended"], Expansion(3, spared=1, ends_text=True)),
    ],
    ids=lambda value: value.name if isinstance(value, Golden) else "",
)
def test_what_fills_queries_up_is_told_from_what_ends_every_text(golden: Golden, expansion: Expansion) -> None:
    assert pipeline(golden).writer.expansion == expansion


@pytest.mark.parametrize("name", ["hidden", "ended"])
def test_a_query_that_ends_in_what_fills_it_up_is_refused(name: str) -> None:
    reads = pipeline(LFM2[name])
    good = {"text": ["Apple", "", "<|im_end|> Apple", "word " * 100], "is_query": True}
    assert {len(prompt.token_ids) for prompt in reads.encode(reads.parse(good)).prompts} == {
        reads.writer.settings.query_length
    }
    for bad in ("Apple<|im_end|>", "<|im_end|>", "<|im_end|><|im_end|>  "):
        with pytest.raises(RequestError, match=r"text\[1\]: ends with '<\|im_end\|>', which only query expansion"):
            reads.encode(reads.parse({"text": ["Apple", bad], "is_query": True}))


def test_a_text_may_end_as_it_likes_where_expansion_is_seen() -> None:
    reads = pipeline(LFM2["attended"])
    (prompt,) = reads.encode(reads.parse({"text": "Apple<|im_end|>", "is_query": True})).prompts
    assert len(prompt.token_ids) == 24


def test_an_expansion_on_the_left_stops_the_start(tmp_path: Path) -> None:
    checkpoint = changed(tmp_path, "tokenizer_config.json", padding_side="left")
    with pytest.raises(CheckpointError, match="pads on the left"):
        ColbertPipeline.read(str(checkpoint.path), None, 512, Limits())


def test_defaults_are_pylate_s() -> None:
    settings = ColbertSettings()
    assert (settings.query_prefix, settings.document_prefix) == ("[Q] ", "[D] ")
    assert (settings.query_length, settings.document_length) == (32, 180)
    assert settings.hides_expansion
    assert len(settings.skiplist_words) == 32
