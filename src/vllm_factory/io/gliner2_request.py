"""Requests of GLiNER2. The schema is the dictionary that gliner2 2.1.0's ``Schema.from_dict`` accepts.

Lists of names and the library's shorthands are brought into one form when they are read; the order in which a
client wrote things is kept, because it is part of the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from vllm_factory.errors import RequestError, shown
from vllm_factory.io.gliner2_overlap import Policy, policy_called
from vllm_factory.io.limits import Limits
from vllm_factory.io.ner import Truncation, check_texts, check_unicode, finite_number, request_error

#: Tokens of the prompt's own grammar: a name that is one of them would end the schema, or a task of it.
SEPARATORS = ("[SEP_STRUCT]", "[SEP_TEXT]")
#: Keys that a found entity has anyway.
_ENTITY_KEYS = ("text", "confidence", "start", "end")

Probability = Annotated[float, BeforeValidator(finite_number), Field(ge=0.0, le=1.0)]
Dtype = Literal["str", "list"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Name an unknown key together with those that there are."""
        if isinstance(value, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            unknown = [key for key in value if key not in known]
            if unknown:
                raise ValueError(f"unknown field {shown(unknown[0])}; known are {', '.join(known)}")
        return value


def _named(value: Any) -> Any:
    """Types as a list of names, or a mapping to a description or to options: always the latter."""
    if isinstance(value, list):
        if any(not isinstance(name, str) for name in value):
            raise ValueError("expected a list of strings, or an object")
        name, times = next(iter(Counter(value).most_common(1)), ("", 0))
        if times > 1:
            raise ValueError(f"{shown(name)} twice; names must be unique")
        value = {name: {} for name in value}
    if not isinstance(value, dict):
        return value
    if any(isinstance(name, str) and not name.strip() for name in value):
        raise ValueError("a name is empty")
    return {name: {"description": each} if isinstance(each, str) else each for name, each in value.items()}


def _labels(value: Any) -> Any:
    """Labels as a list, or a mapping to descriptions: always the latter, ``None`` for no description."""
    if isinstance(value, dict) and None in value.values():
        raise ValueError("expected strings as descriptions")
    if not isinstance(value, list):
        return value
    if any(not isinstance(label, str) for label in value):
        raise ValueError("expected a list of strings, or an object from label to description")
    return dict.fromkeys(value)


def _unique_labels(value: Any) -> Any:
    if isinstance(value, list | dict):
        if len(value) < 2:
            raise ValueError("expected at least two labels")
        if isinstance(value, list) and len({label for label in value if isinstance(label, str)}) < len(value):
            raise ValueError("labels must be strings that differ")
        if any(isinstance(label, str) and not label.strip() for label in value):
            raise ValueError("a label is empty")
    return _labels(value)


class EntityType(_Strict):
    """Options of an entity type."""

    description: StrictStr | None = Field(default=None, description="What the model reads beside the name.")
    dtype: Dtype | None = Field(default=None, description='"list" for all mentions (the default), "str" for one.')
    threshold: Probability | None = Field(default=None, description="Instead of the request's.")


class RelationType(_Strict):
    """Options of a relation type."""

    description: StrictStr | None = Field(default=None, description="What the model reads beside the name.")
    threshold: Probability | None = Field(default=None, description="Instead of the request's.")


class AttributeGroup(_Strict):
    """Labels of which every found entity gets one, or several."""

    labels: list[StrictStr] = Field(min_length=1, description="The values there are.")
    multi_label: StrictBool = Field(default=False, description="Each value by itself, instead of one of them.")
    threshold: Probability = Field(default=0.5, description="Of multi_label.")
    applies_to: list[StrictStr] | None = Field(default=None, description="Entity types; all when absent.")
    qualify_labels: StrictBool = Field(default=False, description="The model reads the group's name as well.")


class Classification(_Strict):
    """One question about the whole text."""

    task: StrictStr = Field(min_length=1, description="Its name, and the key of its answer.")
    labels: Annotated[dict[StrictStr, StrictStr | None], BeforeValidator(_unique_labels)] = Field(
        description="The answers there are, or a mapping from answer to description."
    )
    multi_label: StrictBool = Field(default=False, description="Several answers may hold.")
    cls_threshold: Probability = Field(default=0.5, description="Of multi_label; the best answer always counts.")
    top_k: Annotated[StrictInt, Field(ge=1)] | None = Field(
        default=None, description="Of multi_label: no more answers than that, best first."
    )
    class_act: Literal["auto", "sigmoid", "softmax"] | None = Field(
        default=None, description="How scores are made; by multi_label when absent."
    )
    prompt: StrictStr | None = Field(default=None, description="What the model reads behind the name.")
    examples: list[tuple[StrictStr, StrictStr]] | None = Field(
        default=None, description="Pairs of text and answer."
    )


class StructureField(_Strict):
    """One field of a structure."""

    name: StrictStr = Field(min_length=1, description="Its name.")
    dtype: Dtype = Field(default="list", description='"list" for all values, "str" for the best one.')
    choices: Annotated[list[StrictStr], Field(min_length=1)] | None = Field(
        default=None, description="The values there are; without, values are parts of the text."
    )
    description: StrictStr | None = Field(default=None, description="What the model reads beside the name.")
    threshold: Probability | None = Field(default=None, description="Instead of the request's.")
    cardinality: Literal["optional_one", "required_one", "zero_or_more", "one_or_more"] | None = Field(
        default=None, description="Read by the boundary architecture only, in the library as here."
    )
    exclusive: StrictBool = Field(
        default=False, description="Read by the boundary architecture only, in the library as here."
    )


class Structure(_Strict):
    """A kind of record."""

    fields: Annotated[list[StructureField], Field(min_length=1)] = Field(description="Its fields.")
    mode: Literal["natural", "latent", "anchorless"] | None = Field(
        default=None, description="Read by the boundary architecture only, in the library as here."
    )
    anchor: StrictStr | None = Field(default=None, description="A field, in mode natural.")
    occurrence_policy: Literal["all", "first", "error_on_ambiguous", "latent_all"] | None = Field(
        default=None, description="Read in training only."
    )

    @model_validator(mode="after")
    def _anchored(self) -> Structure:
        names = [field.name for field in self.fields]
        if self.anchor and self.mode not in (None, "natural"):
            raise ValueError(f"mode {self.mode} takes no anchor")
        if self.anchor and self.mode == "natural" and self.anchor not in names:
            raise ValueError(f"anchor {shown(self.anchor)} is none of its fields")
        return self


class Schema(_Strict):
    """What to extract."""

    entities: Annotated[dict[StrictStr, EntityType], BeforeValidator(_named), Field(min_length=1)] | None = Field(
        default=None, description="Names, or a mapping from name to description or options."
    )
    structures: Annotated[dict[StrictStr, Structure], BeforeValidator(_named), Field(min_length=1)] | None = Field(
        default=None, description="A mapping from name to structure."
    )
    classifications: Annotated[list[Classification], Field(min_length=1)] | None = Field(
        default=None, description="Questions about the whole text."
    )
    relations: Annotated[dict[StrictStr, RelationType], BeforeValidator(_named), Field(min_length=1)] | None = (
        Field(default=None, description="Names, or a mapping from name to description or options.")
    )
    entity_attributes: dict[StrictStr, AttributeGroup] | None = Field(
        default=None, description="A mapping from name to group of labels that describe found entities."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Schema:
        sections = (self.entities, self.structures, self.classifications, self.relations)
        if all(section is None for section in sections):
            raise ValueError("expected at least one of entities, structures, classifications, relations")
        tasks = [each.task for each in self.classifications or ()]
        if len(set(tasks)) < len(tasks):
            raise ValueError("two classifications have the same task")
        if self.entity_attributes is not None:
            if self.entities is None:
                raise ValueError("entity_attributes need entities")
            _check_attributes(self.entity_attributes, self.entities)
        return self

    @property
    def attribute_prompts(self) -> dict[str, str]:
        """What the model reads for each label of an attribute group."""
        groups = (self.entity_attributes or {}).items()
        return {
            label: f"{name}: {label}" if group.qualify_labels else label
            for name, group in groups
            for label in group.labels
        }


def _check_attributes(groups: Mapping[str, AttributeGroup], entities: Mapping[str, EntityType]) -> None:
    seen: set[str] = set()
    for name, group in groups.items():
        if not name or name in _ENTITY_KEYS:
            raise ValueError(f"entity_attributes: a group cannot be called {shown(name)}")
        unknown = [each for each in group.applies_to or () if each not in entities]
        if unknown:
            raise ValueError(f"entity_attributes: {shown(name)} applies to {shown(unknown[0])}, no entity type")
        for label in group.labels:
            if not label.strip() or label in seen:
                raise ValueError(f"entity_attributes: label {shown(label)} is empty, or there twice")
            seen.add(label)
            if (f"{name}: {label}" if group.qualify_labels else label) in entities:
                raise ValueError(
                    f"entity_attributes: label {shown(label)} is an entity type as well; qualify_labels helps"
                )


def _policy(value: Any) -> Any:
    """The policy that a name means, or the name if none."""
    return policy_called(value) or value if isinstance(value, str) else value


class Gliner2Request(_Strict):
    """``data`` of a GLiNER2 request."""

    text: StrictStr | list[StrictStr] = Field(description="A text, or a list of texts.")
    schema_: Schema | None = Field(
        default=None, alias="schema", description="What to extract, as gliner2's Schema.from_dict takes it."
    )
    labels: Annotated[dict[StrictStr, StrictStr | None], BeforeValidator(_labels), Field(min_length=1)] | None = (
        Field(default=None, description="Short for a schema of these entities.")
    )
    threshold: Probability = Field(default=0.5, description="Spans must reach it, where nothing else is said.")
    include_confidence: StrictBool = Field(default=False, description="Answer scores as well.")
    include_spans: StrictBool = Field(
        default=False,
        description=(
            "Answer character offsets as well. As in the library, a text without closing punctuation is read with "
            "a dot behind it, and a span that takes in the dot ends one character behind the text."
        ),
    )
    format_results: StrictBool = Field(default=True, description="False answers the library's raw results.")
    overlap_policy: Annotated[Policy, BeforeValidator(_policy)] | None = Field(
        default=None, description="Which overlapping spans of one field stay; greedy by score when absent."
    )
    max_len: Annotated[StrictInt, Field(ge=1)] | None = Field(default=None, description="Words read of a text.")
    chunk_size: Annotated[StrictInt, Field(ge=1)] | None = Field(
        default=None, description="Read every text in chunks of so many words, as the library's extract_long does."
    )
    chunk_overlap: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None, description="Words that two chunks share; 64 when absent."
    )
    truncation: Truncation = Field(
        default="window",
        description=(
            "What happens to a text longer than the model reads at once: chunks of words, merged as the library "
            "does; only its beginning; or an error."
        ),
    )
    include_usage: StrictBool = Field(
        default=False,
        description="Answer an object with the result, usage, and what was cut or chunked, instead of the result.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Gliner2Request:
        if (self.schema_ is None) == (self.labels is None):
            raise ValueError("expected either schema or labels")
        if self.chunk_size is None:
            if self.chunk_overlap is not None:
                raise ValueError("chunk_overlap is for requests with chunk_size")
        elif self.overlap >= self.chunk_size:
            raise ValueError(f"chunk_overlap {self.overlap} must be smaller than chunk_size {self.chunk_size}")
        elif self.max_len is not None or not self.format_results:
            raise ValueError("chunk_size goes with neither max_len nor format_results false")
        return self

    @property
    def overlap(self) -> int:
        """Words that two chunks share."""
        return 64 if self.chunk_overlap is None else self.chunk_overlap

    @property
    def texts(self) -> list[str]:
        """The texts, one or many."""
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def to_extract(self) -> Schema:
        """The schema, given or made of the labels."""
        if self.schema_ is not None:
            return self.schema_
        return Schema(
            entities={
                name: EntityType(description=description) for name, description in (self.labels or {}).items()
            }
        )


def parse_gliner2_request(data: Any, limits: Limits) -> Gliner2Request:
    """Check a request's ``data``.

    Raises:
        RequestError: The message names the field, the value, and what is accepted.
    """
    if not isinstance(data, dict):
        raise RequestError("data", f"{shown(data)}; expected an object with text and a schema or labels")
    for field in ("schema", "labels"):
        for path, text in _strings(data.get(field), field):
            check_unicode(path, text)
    try:
        request = Gliner2Request.model_validate(data)
    except ValidationError as error:
        raise request_error(error, []) from error
    check_texts(request.text, limits)
    _check_schema(request.to_extract, "labels" if request.schema_ is None else "schema", data, limits)
    return request


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every string of a JSON value, keys included, with its place."""
    stack = [(value, path)]
    while stack:
        value, path = stack.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            for key, each in value.items():
                place = f"{path}[{shown(key)}]"
                stack += [(key, place), (each, place)]
        elif isinstance(value, list):
            stack += [(each, f"{path}[{index}]") for index, each in enumerate(value)]


def _check_schema(schema: Schema, field: str, data: dict[str, Any], limits: Limits) -> None:
    strings = list(_strings(data[field], field))
    reserved = next(((path, text) for path, text in strings if text in SEPARATORS), None)
    if reserved:
        raise RequestError(reserved[0], f"{shown(reserved[1])} is a separator of the prompt; use another name")
    characters = sum(len(text) for _, text in strings)
    if characters > limits.max_chars:
        raise RequestError(field, f"{characters} characters; one request takes {limits.max_chars}")
    count = len(schema.entities or ()) + len(schema.relations or ()) + len(schema.attribute_prompts)
    count += sum(len(each.labels) for each in schema.classifications or ())
    fields = [field for each in (schema.structures or {}).values() for field in each.fields]
    count += len(fields) + sum(len(each.choices or ()) for each in fields)
    if count > limits.max_labels:
        raise RequestError(
            field, f"{count} types, labels, fields and choices; one request takes {limits.max_labels}"
        )
