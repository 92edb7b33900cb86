"""Requests and responses of entity recognition, shared by every plugin of the GLiNER family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from vllm_factory.errors import RequestError, shown
from vllm_factory.io.limits import Limits

ModelT = TypeVar("ModelT", bound=BaseModel)
Truncation = Literal["error", "truncate", "window"]


def finite_number(value: Any) -> Any:
    """Validator of a number as JSON knows it: no string, no boolean, not infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


#: What a field that takes several types accepts, in words.
_ACCEPTED = {
    "text": "expected a string or a list of strings",
    "labels": "expected a list of strings, or an object from label to description",
    "candidate_labels": "expected a list of strings or objects, or an object from label to description",
    "image": "expected a data URI or a URL, or a list of them",
    "mentions": "expected a list of objects with start and end; for a list of texts, a list of such lists",
}
#: Objects inside requests, by which pydantic names the branches of a union.
_MODELS = ("Candidate", "Document", "Mention")
_MESSAGES = {
    "extra_forbidden": "unknown field; known are {fields}",
    "missing": "the field is required",
    "string_unicode": "not valid Unicode (a lone surrogate)",
    "string_type": "expected a string",
    "bool_type": "expected true or false",
    "too_short": "expected at least one",
}


class TextsRequest(BaseModel):
    """What every request for entities in texts has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: StrictStr | list[StrictStr] = Field(description="A text, or a list of texts.")
    threshold: Annotated[float, BeforeValidator(finite_number), Field(ge=0.0, le=1.0)] = Field(
        default=0.5, description="Entities score above it; from 0 to 1."
    )
    flat_ner: StrictBool = Field(default=True, description="Entities may not overlap; false lets them nest.")
    multi_label: StrictBool = Field(default=False, description="One span may have several labels.")
    truncation: Truncation = Field(
        default="window",
        description=(
            "What happens to a text longer than the model reads at once: windows of whole words, merged; "
            "only its beginning; or an error."
        ),
    )
    include_usage: StrictBool = Field(
        default=False,
        description="Answer an object with entities, usage, and what was cut or windowed, instead of a list.",
    )

    @property
    def texts(self) -> list[str]:
        """The texts, one or many."""
        return [self.text] if isinstance(self.text, str) else self.text


class NerRequest(TextsRequest):
    """``data`` of an entity recognition request."""

    labels: list[StrictStr] | dict[StrictStr, StrictStr] = Field(
        description="Entity types to find, or a mapping from type to a description that the model reads instead.",
        min_length=1,
    )

    @property
    def label_names(self) -> list[str]:
        """Names without repetition, in the order given."""
        return list(dict.fromkeys(self.labels))

    @property
    def label_prompts(self) -> list[str]:
        """What the model reads for each name: its description, or itself."""
        return label_prompts(self.labels)


def label_prompts(labels: list[str] | dict[str, str]) -> list[str]:
    """What the model reads for each label, without repetition: its description, or itself."""
    return list(labels.values()) if isinstance(labels, dict) else list(dict.fromkeys(labels))


def parse_ner_request(data: Any, limits: Limits) -> NerRequest:
    """Check a request's ``data``.

    Raises:
        RequestError: The message names the field, the value, and what is accepted.
    """
    request = validated(NerRequest, data, "an object with text and labels")
    check_texts(request.text, limits)
    check_labels(request.labels, limits)
    return request


def validated(model: type[ModelT], data: Any, expected: str) -> ModelT:
    """A request's ``data`` as ``model``, types and bounds checked.

    Raises:
        RequestError: The message names the field, the value, and what is accepted.
    """
    if not isinstance(data, dict):
        raise RequestError("data", f"{shown(data)}; expected {expected}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise request_error(error, list(model.model_fields)) from error


def request_error(error: ValidationError, fields: Sequence[str]) -> RequestError:
    """The first wrong field's most precise problem, named as the client wrote it.

    Args:
        error: What pydantic found.
        fields: The request's own fields, for the message about an unknown one.
    """
    errors = error.errors(include_url=False, include_context=False)
    # Of the alternatives of a union, the one that got farthest is the one that the client meant.
    same_field = [item for item in errors if item["loc"][:1] == errors[0]["loc"][:1]]
    worst = max(same_field, key=lambda item: len(_path(item["loc"])))
    path, kind = _path(worst["loc"]), worst["type"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{shown(part)[1:-1]}" for part in path).lstrip(".")
    message = worst["msg"].removeprefix("Value error, ")
    if kind in _MESSAGES:
        message = _MESSAGES[kind].format(fields=", ".join(fields))
    if len(path) == 1 and kind.endswith("_type") and field in _ACCEPTED:
        message = _ACCEPTED[field]
    if kind in ("extra_forbidden", "missing"):
        return RequestError(field, message)
    return RequestError(field or "data", f"{message} (got {shown(worst['input'])})")


def _path(location: Sequence[Any]) -> list[Any]:
    """Steps into the request, without those that name a branch of a union."""
    return [
        part
        for part in location
        if isinstance(part, int)
        or not (part.startswith(("list[", "dict[", "constrained-")) or part in ("str", "[key]", *_MODELS))
    ]


def check_texts(text: str | list[str], limits: Limits) -> None:
    """Refuse no text, too many, too much of it, and what is no Unicode."""
    texts = [text] if isinstance(text, str) else text
    if not texts:
        raise RequestError("text", "an empty list; expected at least one text")
    if len(texts) > limits.max_texts:
        raise RequestError("text", f"{len(texts)} texts; one request takes {limits.max_texts}")
    total = sum(map(len, texts))
    if total > limits.max_chars:
        raise RequestError("text", f"{total} characters; one request takes {limits.max_chars}")
    for index, each in enumerate(texts):
        check_unicode("text" if isinstance(text, str) else f"text[{index}]", each)


def check_labels(labels: list[str] | dict[str, str], limits: Limits) -> None:
    """Refuse too many labels, what is no Unicode, and descriptions that no answer could tell apart."""
    if len(labels) > limits.max_labels:
        raise RequestError("labels", f"{len(labels)} labels; one request takes {limits.max_labels}")
    for index, label in enumerate(labels):
        check_unicode(f"labels[{index}]", label)
    if isinstance(labels, dict):
        _check_descriptions(labels)


def _check_descriptions(labels: dict[str, str]) -> None:
    first_with: dict[str, str] = {}
    for label, description in labels.items():
        check_unicode(f"labels[{shown(label)}]", description)
        if description in first_with:
            raise RequestError(
                f"labels[{shown(label)}]",
                f"the same description as {shown(first_with[description])}; descriptions must differ",
            )
        first_with[description] = label


def check_unicode(field: str, text: str) -> None:
    """Refuse a text that cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            field, f"not valid Unicode: a lone surrogate at character {error.start} of {shown(text)}"
        ) from error


def entity(text: str, label: str, score: float, start: int, end: int) -> dict[str, Any]:
    """One entity of a response; ``text[start:end]`` is its text."""
    return {"text": text[start:end], "label": label, "score": score, "start": start, "end": end}


def ner_response(
    request: TextsRequest,
    entities: Sequence[list[dict[str, Any]]],
    prompt_tokens: int,
    notes: Sequence[dict[str, Any]],
) -> Any:
    """The response's ``data``.

    Args:
        request: The request.
        entities: Those of each text.
        prompt_tokens: Tokens that the engine read.
        notes: For each text, how it was read (``windows``, ``truncated``).
    """
    single = isinstance(request.text, str)
    found: Any = entities[0] if single else list(entities)
    if not request.include_usage:
        return found
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"entities": found, "usage": usage, "texts": notes[0] if single else list(notes)}
