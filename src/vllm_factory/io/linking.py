"""Requests and responses of entity linking, shared by the linker and the reranker.

What the two do follows glinker 0.1.1: a text's spans are scored against the entities of a knowledge base, each
written as one label (its layers L3 and L4), and what is found gets the entity it links to (its layer L0).
"""

from __future__ import annotations

import string
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr

from vllm_factory.errors import RequestError
from vllm_factory.io.limits import Limits
from vllm_factory.io.ner import TextsRequest, check_labels, check_texts, check_unicode, label_prompts, validated
from vllm_factory.poolers.selection import MAX_TOP

#: How a candidate is written for the model when the request does not say.
TEMPLATE = "{label}"
TEMPLATE_WITH_DESCRIPTION = "{label}: {description}"
TEMPLATE_FIELDS = ("label", "description", "entity_type", "entity_id")


def _template(value: str) -> str:
    """Validator of a template: known fields only, and nothing that reaches into Python."""
    try:
        parts = list(string.Formatter().parse(value))
    except ValueError as error:
        raise ValueError(f"not a template: {error}") from error
    fields = [(field, spec, conversion) for _, field, spec, conversion in parts if field is not None]
    if not fields or any(f not in TEMPLATE_FIELDS or spec or conversion for f, spec, conversion in fields):
        raise ValueError(f"a template holds at least one of {', '.join(f'{{{name}}}' for name in TEMPLATE_FIELDS)}")
    return value


class Candidate(BaseModel):
    """One entity of a knowledge base."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: StrictStr = Field(description="Its name.")
    description: StrictStr = Field(default="", description="What it is; the model reads it with the name.")
    entity_id: StrictStr | None = Field(default=None, description="Returned with the candidate.")
    entity_type: StrictStr = Field(default="", description="For templates.")

    def written(self, template: str | None) -> str:
        """What the model reads."""
        if template is None:
            template = TEMPLATE_WITH_DESCRIPTION if self.description else TEMPLATE
        return template.format(**{name: getattr(self, name) or "" for name in TEMPLATE_FIELDS})


class Mention(BaseModel):
    """A span of a text to link. An entity of an earlier response may be sent as it is."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    start: StrictInt = Field(ge=0, description="Its first character.")
    end: StrictInt = Field(ge=1, description="The character behind its last one.")


class LinkRequest(TextsRequest):
    """``data`` of a linking request, or of plain entity recognition."""

    labels: Annotated[list[StrictStr] | dict[StrictStr, StrictStr], Field(min_length=1)] | None = Field(
        default=None,
        description=(
            "Entity types to find, or a mapping from type to a description that the model reads instead. With "
            "candidate_labels, the entities found are the mentions that are linked."
        ),
    )
    candidate_labels: (
        Annotated[list[StrictStr | Candidate] | dict[StrictStr, StrictStr], Field(min_length=1)] | None
    ) = Field(
        default=None,
        description=(
            "Entities of a knowledge base to link to: names, objects, or a mapping from name to description. Of "
            "candidates that the model reads alike (in any case of letters) the first counts."
        ),
    )
    mentions: list[Mention] | list[list[Mention]] | None = Field(
        default=None,
        description=(
            "The only spans to look at; for a list of texts, one list a text. A mention that does not begin and "
            "end with words of the model is not linked."
        ),
    )
    template: Annotated[StrictStr, AfterValidator(_template)] | None = Field(
        default=None,
        description=(
            "How a candidate is written for the model, with {label}, {description}, {entity_type} and "
            "{entity_id}. By default its label, and its description behind a colon if it has one."
        ),
    )
    top_k: StrictInt = Field(default=5, ge=1, le=MAX_TOP, description="Ranked candidates listed for each entity.")

    @property
    def label_names(self) -> list[str]:
        """Entity types without repetition, in the order given."""
        return list(dict.fromkeys(self.labels or ()))

    @property
    def label_prompts(self) -> list[str]:
        """What the model reads for each entity type."""
        return label_prompts(self.labels or [])

    @property
    def candidates(self) -> dict[str, Candidate]:
        """What the model reads for each candidate, and the candidate; the first of those that read alike."""
        written: dict[str, Candidate] = {}
        seen = set()
        for candidate in self.given_candidates:
            text = candidate.written(self.template)
            if text.lower() not in seen:
                seen.add(text.lower())
                written[text] = candidate
        return written

    @cached_property
    def given_candidates(self) -> list[Candidate]:
        """All candidates as objects."""
        given = self.candidate_labels or []
        if isinstance(given, dict):
            return [Candidate(label=label, description=text) for label, text in given.items()]
        return [Candidate(label=item) if isinstance(item, str) else item for item in given]

    def mentions_of(self, index: int) -> list[Mention] | None:
        """The mentions of one text; ``None`` when every span counts."""
        if self.mentions is None:
            return None
        if isinstance(self.text, str):
            return [mention for mention in self.mentions if isinstance(mention, Mention)]
        given = self.mentions[index]
        return given if isinstance(given, list) else []


class RerankRequest(LinkRequest):
    """``data`` of a reranking request, or of plain entity recognition."""

    max_labels: StrictInt = Field(
        default=20, ge=1, description="Candidates that the model reads at once; more are read in parts."
    )


def check_link_request(request: LinkRequest, limits: Limits) -> None:
    """Refuse what types alone cannot tell.

    Raises:
        RequestError: The message names the field, the value, and what is accepted.
    """
    check_texts(request.text, limits)
    if request.labels is None and request.candidate_labels is None:
        raise RequestError("labels", "neither labels nor candidate_labels; send entity types, candidates, or both")
    check_labels(request.labels or [], limits)
    _check_candidates(request, limits)
    if request.mentions is None:
        return
    if request.labels is not None and request.candidate_labels is not None:
        raise RequestError(
            "mentions", "labels would find the mentions that are given; leave out one of labels and mentions"
        )
    _check_mentions(request, limits)


def parse_link_request(model: type[LinkRequest], data: Any, limits: Limits) -> LinkRequest:
    """Check a request's ``data``.

    Raises:
        RequestError: The message names the field, the value, and what is accepted.
    """
    request = validated(model, data, "an object with text, and labels or candidate_labels")
    check_link_request(request, limits)
    return request


def _check_candidates(request: LinkRequest, limits: Limits) -> None:
    given = request.given_candidates
    if len(given) > limits.max_candidates:
        raise RequestError(
            "candidate_labels", f"{len(given)} candidates; one request takes {limits.max_candidates}"
        )
    for index, candidate in enumerate(given):
        for name in TEMPLATE_FIELDS:
            check_unicode(f"candidate_labels[{index}].{name}", getattr(candidate, name) or "")
    if request.template:
        check_unicode("template", request.template)


def _check_mentions(request: LinkRequest, limits: Limits) -> None:
    mentions = request.mentions or []
    nested = [isinstance(item, list) for item in mentions]
    if isinstance(request.text, str):
        if any(nested):
            raise RequestError("mentions", "a list of lists for one text; expected a list of mentions")
    elif not all(nested) or len(mentions) != len(request.text):
        raise RequestError(
            "mentions",
            f"{len(mentions)} entries for {len(request.text)} texts; expected one list of mentions a text",
        )
    total = 0
    for index, text in enumerate(request.texts):
        prefix = "mentions" if isinstance(request.text, str) else f"mentions[{index}]"
        for place, mention in enumerate(request.mentions_of(index) or ()):
            total += 1
            if not mention.start < mention.end <= len(text):
                raise RequestError(
                    f"{prefix}[{place}]",
                    f"characters {mention.start} to {mention.end} are no span of a text of {len(text)} characters",
                )
    if total > limits.max_mentions:
        raise RequestError("mentions", f"{total} mentions; one request takes {limits.max_mentions}")


def ranked_candidate(candidate: Candidate, score: float) -> dict[str, Any]:
    """One entry of an entity's ``candidates``."""
    entry: dict[str, Any] = {"label": candidate.label, "score": score}
    if candidate.entity_id is not None:
        entry["entity_id"] = candidate.entity_id
    return entry
