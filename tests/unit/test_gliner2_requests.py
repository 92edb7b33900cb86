"""GLiNER2 requests that are refused, each with its field and message; limits; long texts; hostile blobs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import TEXTS
from gliner2_checkpoints import SCHEMA
from gliner2_harness import Gliner2Engine, Gliner2Library, assert_same_result
from vllm_factory.errors import RequestError, TransportError
from vllm_factory.io.gliner2_request import parse_gliner2_request
from vllm_factory.io.limits import Limits
from vllm_factory.pooling.protocol import Status

pytestmark = pytest.mark.deberta_gliner2
LIMITS = Limits(max_chars=200, max_texts=3, max_labels=5)


def schema(**sections: Any) -> dict[str, Any]:
    return {"text": "Angela met Tim.", "schema": sections}


def classes(**options: Any) -> dict[str, Any]:
    return schema(classifications=[{"task": "t", "labels": ["a", "b"], **options}])


def structure(*fields: Any, **options: Any) -> dict[str, Any]:
    return schema(structures={"s": {"fields": list(fields), **options}})


GOOD = {"text": "Angela met Tim.", "labels": ["person"]}
REFUSED: dict[str, tuple[Any, str]] = {
    "data is null": (None, "data: None; expected an object"),
    "no text": ({"labels": ["a"]}, "text: the field is required"),
    "text of the wrong type": ({**GOOD, "text": 3}, "text: expected a string or a list of strings (got 3)"),
    "no texts": ({**GOOD, "text": []}, "text: an empty list"),
    "too long": ({**GOOD, "text": "a" * 201}, "text: 201 characters; one request takes 200"),
    "surrogate in a text": ({**GOOD, "text": "a\ud800"}, "text: not valid Unicode"),
    "neither": ({"text": "a"}, "expected either schema or labels"),
    "both": ({**GOOD, "schema": {"entities": ["a"]}}, "expected either schema or labels"),
    "unknown field": ({**GOOD, "lables": []}, "unknown field 'lables'; known are text, schema, labels"),
    "braces in a field": ({**GOOD, "{fields}": 1}, "unknown field '{fields}'"),
    "labels empty": ({**GOOD, "labels": []}, "labels: expected at least one (got [])"),
    "labels not strings": ({**GOOD, "labels": ["a", 1]}, "labels: expected a list of strings"),
    "label description": ({**GOOD, "labels": {"a": 1}}, "labels.a: expected a string (got 1)"),
    "too many labels": (
        {**GOOD, "labels": list("abcdef")},
        "labels: 6 types, labels, fields and choices; one request takes 5",
    ),
    "threshold": ({**GOOD, "threshold": 1.5}, "threshold: Input should be less than or equal to 1 (got 1.5)"),
    "threshold NaN": ({**GOOD, "threshold": math.nan}, "threshold: expected a finite number"),
    "threshold a string": ({**GOOD, "threshold": "0.5"}, "threshold: expected a number"),
    "include_spans": ({**GOOD, "include_spans": 1}, "include_spans: expected true or false"),
    "overlap policy": ({**GOOD, "overlap_policy": "x"}, "overlap_policy: Input should be 'allow', 'nested'"),
    "max_len": ({**GOOD, "max_len": 0}, "max_len: Input should be greater than or equal to 1"),
    "chunk_size": ({**GOOD, "chunk_size": 64}, "chunk_overlap 64 must be smaller than chunk_size 64"),
    "chunk_overlap alone": ({**GOOD, "chunk_overlap": 1}, "chunk_overlap is for requests with chunk_size"),
    "chunks of raw results": (
        {**GOOD, "chunk_size": 100, "format_results": False},
        "chunk_size goes with neither max_len nor format_results false",
    ),
    "too many chunks": (
        {**GOOD, "text": "a b c d e f", "chunk_size": 2, "chunk_overlap": 1},
        "chunk_size: 6 words in chunks of 2 are more than the 3 chunks",
    ),
    "schema empty": (schema(), "schema: expected at least one of entities"),
    "schema a list": ({"text": "a", "schema": []}, "schema: "),
    "schema unknown section": (schema(entitys=["a"]), "schema: unknown field 'entitys'; known are entities"),
    "entities empty": (schema(entities=[]), "schema.entities: expected at least one"),
    "entity twice": (schema(entities=["a", "a"]), "schema.entities: 'a' twice; names must be unique"),
    "entity blank": (schema(entities=["a", " "]), "schema.entities: a name is empty"),
    "entity not a string": (schema(entities=["a", []]), "schema.entities: expected a list of strings"),
    "entity null": (schema(entities={"a": None}), "schema.entities.a: "),
    "entity unknown option": (
        schema(entities={"a": {"dtyp": "str"}}),
        "schema.entities.a: unknown field 'dtyp'; known are description, dtype, threshold",
    ),
    "entity dtype": (schema(entities={"a": {"dtype": "int"}}), "schema.entities.a.dtype: Input should be 'str'"),
    "entity threshold": (schema(entities={"a": {"threshold": -1}}), "schema.entities.a.threshold: Input should be"),
    "relation dtype": (schema(relations={"a": {"dtype": "str"}}), "schema.relations.a: unknown field 'dtype'"),
    "structure without fields": (schema(structures={"s": {}}), "schema.structures.s.fields: the field is required"),
    "structure no field": (structure(), "schema.structures.s.fields: expected at least one"),
    "field without name": (
        structure({"dtype": "str"}),
        "schema.structures.s.fields[0].name: the field is required",
    ),
    "field unknown option": (structure({"name": "a", "x": 1}), "schema.structures.s.fields[0]: unknown field 'x'"),
    "field no choice": (structure({"name": "a", "choices": []}), "schema.structures.s.fields[0].choices: expected"),
    "field choice": (
        structure({"name": "a", "choices": [1]}),
        "schema.structures.s.fields[0].choices[0]: expected",
    ),
    "anchor": (structure({"name": "a"}, mode="natural", anchor="b"), "schema.structures.s: anchor 'b' is none"),
    "anchor of another mode": (structure({"name": "a"}, mode="latent", anchor="a"), "mode latent takes no anchor"),
    "one label": (classes(labels=["a"]), "schema.classifications[0].labels: expected at least two labels"),
    "label twice": (
        classes(labels=["a", "a"]),
        "schema.classifications[0].labels: labels must be strings that differ",
    ),
    "label blank": (classes(labels=["a", ""]), "schema.classifications[0].labels: a label is empty"),
    "top_k": (classes(top_k=0), "schema.classifications[0].top_k: Input should be greater"),
    "class_act": (classes(class_act="relu"), "schema.classifications[0].class_act: Input should be 'auto'"),
    "examples": (classes(examples=[["a"]]), "schema.classifications[0].examples[0][1]: the field is required"),
    "task twice": (
        schema(classifications=[{"task": "t", "labels": ["a", "b"]}] * 2),
        "schema: two classifications",
    ),
    "attributes alone": (
        schema(relations=["r"], entity_attributes={"g": {"labels": ["x"]}}),
        "schema: entity_attributes need entities",
    ),
    "attribute applies to nothing": (
        schema(entities=["a"], entity_attributes={"g": {"labels": ["x"], "applies_to": ["b"]}}),
        "schema: entity_attributes: 'g' applies to 'b', no entity type",
    ),
    "attribute is an entity": (
        schema(entities=["a"], entity_attributes={"g": {"labels": ["a"]}}),
        "is an entity type as well",
    ),
    "attribute group's name": (
        schema(entities=["a"], entity_attributes={"text": {"labels": ["x"]}}),
        "called 'text'",
    ),
    "separator": (schema(entities=["a", "[SEP_TEXT]"]), "'[SEP_TEXT]' is a separator of the prompt"),
    "surrogate in a name": (schema(entities=["\ud800"]), "schema['entities'][0]: not valid Unicode"),
    "surrogate in a choice": (structure({"name": "a", "choices": ["\udfff"]}), "not valid Unicode"),
    "too much schema": (schema(entities={"a": "x" * 300}), "schema: 309 characters; one request takes 200"),
    "deep": (schema(entities=[[[[[]]]]]), "schema.entities: expected a list of strings"),
    "an adapter": ({**GOOD, "adapter": "x"}, "unknown field 'adapter'"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(data: Any, message: str, gliner2_library: Gliner2Library) -> None:
    pipeline = Gliner2Engine(gliner2_library.prepared("lstm"), limits=LIMITS).pipeline
    with pytest.raises(RequestError) as caught:
        pipeline.encode(pipeline.parse(data))
    assert message in str(caught.value)
    str(caught.value).encode("ascii")  # whatever the client sent, the answer can be sent


def test_tasks_that_the_library_would_mix_up_are_refused(gliner2_library: Gliner2Library) -> None:
    tasks = [{"task": "a", "labels": ["x", "y"], "prompt": "b"}, {"task": "a: b", "labels": ["x", "y", "z"]}]
    with pytest.raises(RequestError, match=r"schema.classifications\[0\].task: 'a' with its prompt"):
        gliner2_library.local("lstm").answer(text="a", schema={"classifications": tasks})


def test_pooled_words_refuse_markers_in_names(gliner2_library: Gliner2Library) -> None:
    with pytest.raises(RequestError, match=r"schema: 'a \[E\]' holds one of"):
        gliner2_library.local("mean").answer(text="a", schema={"entities": ["a [E]", "b"]})


def test_defaults_are_the_library_s() -> None:
    request = parse_gliner2_request(GOOD, LIMITS)
    assert (request.threshold, request.include_confidence, request.include_spans) == (0.5, False, False)
    assert request.format_results
    assert request.overlap_policy is None
    assert request.overlap == 64


def test_a_schema_must_leave_room_for_text(gliner2_library: Gliner2Library) -> None:
    engine = Gliner2Engine(gliner2_library.prepared("lstm"), max_tokens=100)
    with pytest.raises(RequestError, match=r"schema: .* tokens; with 16 for text it may be 84"):
        engine.answer(text="a", schema=SCHEMA)


def test_texts_that_do_not_fit(gliner2_library: Gliner2Library) -> None:
    engine = Gliner2Engine(gliner2_library.prepared("lstm"), max_tokens=64)
    whole = gliner2_library.local("lstm")
    text = " ".join(TEXTS[:2] * 4)
    data: dict[str, Any] = {"text": text, "labels": ["person", "place"], "threshold": 0.3, "include_spans": True}
    with pytest.raises(RequestError, match=r"text: .* words, .* tokens; beside this schema the model reads"):
        engine.answer(**data, truncation="error")
    with pytest.raises(RequestError, match=r"text: .* words"):
        engine.answer(**data, format_results=False)
    windowed = engine.answer(**data, include_usage=True)
    assert windowed["texts"]["chunks"] > 1
    assert windowed["result"]["entities"]["person"]
    assert all(text[e["start"] : e["end"]] == e["text"] for e in windowed["result"]["entities"]["person"])
    size = next(n for n in (384, 192, 96, 48, 24, 12, 6) if _chunks(whole, text, n) == windowed["texts"]["chunks"])
    assert_same_result(windowed["result"], whole.answer(**data, chunk_size=size, chunk_overlap=size // 6))
    cut = engine.answer(**data, truncation="truncate", include_usage=True)
    assert cut["texts"] == {"chunks": 1, "truncated": True}
    assert cut["usage"]["prompt_tokens"] <= 64


def _chunks(engine: Gliner2Engine, text: str, size: int) -> int:
    answer = engine.answer(
        text=text, labels=["a"], chunk_size=size, chunk_overlap=size // 6, include_usage=True, threshold=1.0
    )
    return int(answer["texts"]["chunks"])


def test_blobs_that_do_not_fit_are_refused(gliner2_library: Gliner2Library) -> None:
    engine = gliner2_library.local("lstm")
    (prompt,) = engine.pipeline.encode(engine.pipeline.parse({"text": TEXTS[0], "schema": SCHEMA})).prompts
    length = len(prompt.token_ids)
    parse = engine.network.head.parse
    parse(prompt.arrays, length)
    draw = np.random.default_rng(0)
    for index, array in enumerate(prompt.arrays):
        others = [array[:-1], np.append(array, array[:1]), array.astype(np.float64), array[:0]]
        if array.dtype.kind == "i" and array.size:
            others += [
                np.where(np.arange(array.size) == 0, value, array).astype(np.int32) for value in (-1, 2**31 - 1)
            ]
        for other in others:
            arrays = [*prompt.arrays[:index], other, *prompt.arrays[index + 1 :]]
            try:
                parse(arrays, length)
            except TransportError:
                continue
            # What is let through must be harmless.
            engine.run([type(prompt)(prompt.token_ids, tuple(arrays))])
    for _ in range(200):
        noise = tuple(draw.integers(-2, 12, draw.integers(0, 6)).astype(array.dtype) for array in prompt.arrays)
        try:
            parse(noise, 10)
        except TransportError:
            continue
        engine.run([type(prompt)(list(range(10)), noise)])


@pytest.mark.parametrize(
    "parameter", ["classifier.2.bias", "count_pred.2.bias", "span_rep_layer.out_project.3.bias"]
)
def test_scores_that_are_no_numbers_are_the_request_s_alone(
    parameter: str, gliner2_library: Gliner2Library
) -> None:
    engine = Gliner2Engine(gliner2_library.prepared("lstm"))
    engine.network.head.get_parameter(parameter).data.fill_(math.nan)
    asked = [{"text": TEXTS[0], "schema": SCHEMA}, {"text": TEXTS[0], "schema": {"entities": ["person"]}}]
    encoded = [engine.pipeline.encode(engine.pipeline.parse(data)) for data in asked]
    whole, entities = engine.run([item.prompts[0] for item in encoded])
    assert whole.status is Status.NOT_FINITE
    assert entities.status is (Status.OK if "classifier" in parameter else Status.NOT_FINITE)


@pytest.mark.parametrize("name", ["lstm", "lstm-v2", "lstm-moe", "mean"])
def test_half_precision_runs(name: str, gliner2_library: Gliner2Library) -> None:
    engine = Gliner2Engine(gliner2_library.prepared(name))
    engine.network.to(torch.bfloat16).prepare(engine.max_tokens)
    answer = engine.answer(text=TEXTS[0], schema=SCHEMA, include_confidence=True)
    assert set(answer) >= {"topic", "mood", "relation_extraction"}
    assert 0 < answer["topic"]["confidence"] < 1
