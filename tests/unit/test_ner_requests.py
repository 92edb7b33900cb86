"""Requests that are refused, each with its field and message, and requests that are not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_factory.errors import RequestError, UnsupportedError
from vllm_factory.io.limits import Limits
from vllm_factory.io.ner import parse_ner_request

GOOD: dict[str, Any] = {"text": "Angela met Tim.", "labels": ["person"]}
LIMITS = Limits(max_chars=100, max_texts=3, max_labels=5)

REFUSED: dict[str, tuple[Any, str]] = {
    "data is null": (None, "data: None; expected an object"),
    "data is a list": ([], "data: []; expected an object"),
    "no text": ({"labels": ["a"]}, "text: the field is required"),
    "no labels": ({"text": "a"}, "labels: the field is required"),
    "text of the wrong type": ({**GOOD, "text": 3}, "text: expected a string or a list of strings (got 3)"),
    "text is null": ({**GOOD, "text": None}, "text: expected a string or a list of strings (got None)"),
    "a text of the wrong type": ({**GOOD, "text": ["a", 3]}, "text[1]: expected a string (got 3)"),
    "no texts": ({**GOOD, "text": []}, "text: an empty list"),
    "too many texts": ({**GOOD, "text": ["a"] * 4}, "text: 4 texts; one request takes 3"),
    "too long": ({**GOOD, "text": ["a" * 60, "b" * 41]}, "text: 101 characters; one request takes 100"),
    "labels empty": ({**GOOD, "labels": []}, "labels: expected at least one (got [])"),
    "labels empty object": ({**GOOD, "labels": {}}, "labels: expected at least one (got {})"),
    "labels a string": ({**GOOD, "labels": "person"}, "labels: expected a list of strings, or an object"),
    "labels not strings": ({**GOOD, "labels": ["a", 1]}, "labels[1]: expected a string (got 1)"),
    "description not a string": ({**GOOD, "labels": {"a": 1}}, "labels.a: expected a string (got 1)"),
    "too many labels": ({**GOOD, "labels": list("abcdef")}, "labels: 6 labels; one request takes 5"),
    "equal descriptions": (
        {**GOOD, "labels": {"a": "x", "b": "x"}},
        "labels['b']: the same description as 'a'",
    ),
    "surrogate in a text": (
        {**GOOD, "text": ["a", "b\ud800"]},
        "text[1]: not valid Unicode: a lone surrogate",
    ),
    "surrogate in a label": ({**GOOD, "labels": ["\udfff"]}, "labels[0]: not valid Unicode"),
    "surrogate in a description": ({**GOOD, "labels": {"a": "\ud800"}}, "labels['a']: not valid Unicode"),
    "surrogate as a field": ({**GOOD, "\ud800": 1}, "not valid Unicode"),
    "threshold NaN": ({**GOOD, "threshold": math.nan}, "threshold: expected a finite number (got nan)"),
    "threshold infinite": ({**GOOD, "threshold": math.inf}, "threshold: expected a finite number (got inf)"),
    "threshold huge": ({**GOOD, "threshold": 10**400}, "threshold: expected a finite number"),
    "threshold below": (
        {**GOOD, "threshold": -1},
        "threshold: Input should be greater than or equal to 0 (got -1)",
    ),
    "threshold above": (
        {**GOOD, "threshold": 2},
        "threshold: Input should be less than or equal to 1 (got 2)",
    ),
    "threshold a string": ({**GOOD, "threshold": "0.5"}, "threshold: expected a number (got '0.5')"),
    "threshold a bool": ({**GOOD, "threshold": True}, "threshold: expected a number (got True)"),
    "threshold null": ({**GOOD, "threshold": None}, "threshold: expected a number (got None)"),
    "flat_ner not a bool": ({**GOOD, "flat_ner": 1}, "flat_ner: expected true or false (got 1)"),
    "truncation unknown": (
        {**GOOD, "truncation": "cut"},
        "truncation: Input should be 'error', 'truncate' or 'window'",
    ),
    "unknown field": ({**GOOD, "lables": []}, "lables: unknown field; known are text, threshold"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(data: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_ner_request(data, LIMITS)
    assert message in str(caught.value)
    str(caught.value).encode("ascii")  # whatever the client sent, the answer can be sent


@pytest.mark.parametrize("threshold", [0, 0.0, 1, 0.25])
def test_thresholds_are_values_zero_included(threshold: float) -> None:
    assert parse_ner_request({**GOOD, "threshold": threshold}, LIMITS).threshold == threshold


def test_defaults_are_the_library_s() -> None:
    request = parse_ner_request(GOOD, LIMITS)
    assert (request.threshold, request.flat_ner, request.multi_label) == (0.5, True, False)
    assert request.truncation == "window"


def test_duplicate_labels_count_once_in_order() -> None:
    assert parse_ner_request({**GOOD, "labels": ["b", "a", "b"]}, LIMITS).label_names == ["b", "a"]


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FACTORY_MAX_LABELS", "7")
    assert Limits.from_environment() == Limits(max_labels=7)


@pytest.mark.parametrize("value", ["0", "-1", "many", ""])
def test_limits_that_are_no_positive_number_stop_start_up(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FACTORY_MAX_TEXTS", value)
    with pytest.raises(UnsupportedError, match="VLLM_FACTORY_MAX_TEXTS"):
        Limits.from_environment()
