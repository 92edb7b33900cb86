"""Requests of retrieval models, shared by every plugin of the family.

``data`` with ``text`` asks for vectors, ``data`` with ``query`` and ``documents`` for a ranking.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr

from vllm_factory.errors import RequestError, shown
from vllm_factory.io import token_pooling
from vllm_factory.io.limits import Limits
from vllm_factory.io.ner import check_texts, check_unicode
from vllm_factory.io.vectors import Output, VectorType

#: Fewer vectors than one in so many are asked for by mistake.
MAX_POOL_FACTOR = 64


def whole_number(value: Any) -> Any:
    """Validator of an integer as JSON knows it: no string, no boolean, no fraction."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected a whole number")
    return value


Positive = Annotated[int, BeforeValidator(whole_number), Field(ge=1)]
_PROMPT_NAME = "Name of one of the checkpoint's prompts, which is put before each text."
_PROMPT = "A text that is put before each text instead of a named prompt."


class VectorOptions(BaseModel):
    """How vectors are written; see :mod:`vllm_factory.io.vectors`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    output: Output = Field(default="float", description="Lists of numbers, or base64 of little-endian rows.")
    dtype: VectorType = Field(
        default="float32", description="What the numbers are rounded to; int8 comes with a scale."
    )


class TextRequest(VectorOptions):
    """``data`` of a request for vectors of texts."""

    text: StrictStr | list[StrictStr] = Field(description="A text, or a list of texts.")
    prompt_name: StrictStr | None = Field(default=None, description=_PROMPT_NAME)
    prompt: StrictStr | None = Field(default=None, description=_PROMPT)

    @property
    def texts(self) -> list[str]:
        """The texts, one or many."""
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def single(self) -> bool:
        """Whether one item was sent, not a list."""
        return isinstance(self.text, str)


class MultiVectorOptions(VectorOptions):
    """What a request for one vector a token may say."""

    is_query: StrictBool = Field(
        default=False, description="Whether the texts are queries; else they are documents."
    )
    pool_factor: Annotated[Positive, Field(le=MAX_POOL_FACTOR)] = Field(
        default=1,
        description="Documents only: similar vectors are merged until about one in so many is left.",
    )


class MultiVectorTextRequest(TextRequest, MultiVectorOptions):
    """``data`` of a request for one vector a token."""


class DenseTextRequest(TextRequest):
    """``data`` of a request for one vector a text."""

    is_query: StrictBool | None = Field(
        default=None,
        description=(
            "Without a prompt or prompt_name: true uses the checkpoint's prompt for queries, false the one for "
            "documents, absent its default prompt (mostly none)."
        ),
    )
    dimensions: Positive | None = Field(
        default=None,
        description=(
            "Keep the first so many dimensions (Matryoshka), normalised again where the checkpoint normalises."
        ),
    )


class VisualRequest(MultiVectorOptions):
    """``data`` of a request for one vector a token, of texts or of images."""

    #: Of which one must be given, or both where the model reads them at once.
    alternatives: ClassVar[tuple[str, ...]] = ("text", "image")

    text: StrictStr | list[StrictStr] | None = Field(default=None, description="A text, or a list of texts.")
    image: StrictStr | list[StrictStr] | None = Field(
        default=None, description="A data URI or an allowed URL of an image, or a list of them."
    )

    @property
    def single(self) -> bool:
        """Whether one item was sent, not a list."""
        return not isinstance(self.text if self.image is None else self.image, list)


class RankOptions(VectorOptions):
    """What a request that ranks documents may say."""

    top_n: Positive | None = Field(default=None, description="Answer the best so many only.")
    return_documents: StrictBool = Field(default=False, description="Each result carries its document's text.")
    similarity: StrictBool = Field(
        default=False,
        description="Each result carries the similarity of every query token and every token of the document.",
    )


class RankRequest(RankOptions):
    """``data`` of a request that ranks documents for a query by MaxSim."""

    query: StrictStr = Field(description="The query.")
    documents: list[StrictStr] = Field(description="The documents to rank.")
    query_prompt_name: StrictStr | None = Field(default=None, description="As prompt_name, for the query.")
    document_prompt_name: StrictStr | None = Field(default=None, description="As prompt_name, for the documents.")

    @property
    def texts(self) -> list[str | None]:
        """Each document's text."""
        return list(self.documents)


class Document(BaseModel):
    """A document to rank: a text, an image, or, where the model reads both at once, an image with its text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: StrictStr | None = Field(default=None, description="Its text.")
    image: StrictStr | None = Field(default=None, description="A data URI or an allowed URL of its image.")


class VisualRankRequest(RankOptions):
    """``data`` of a request that ranks texts and images for a query by MaxSim."""

    query: StrictStr = Field(description="The query.")
    documents: list[StrictStr | Document] = Field(
        description="The documents to rank: texts, and objects with text or image."
    )

    @property
    def texts(self) -> list[str | None]:
        """Each document's text, ``None`` for an image alone."""
        return [document.text for document in self.items]

    @property
    def items(self) -> list[Document]:
        """The documents as objects."""
        return [Document(text=each) if isinstance(each, str) else each for each in self.documents]


def check_text_request(request: TextRequest, prompts: Mapping[str, str], limits: Limits) -> None:
    """Refuse texts that are too many or too long, and prompts that there are not."""
    check_texts(request.text, limits)
    if request.prompt is not None:
        check_unicode("prompt", request.prompt)
        if len(request.prompt) > limits.max_chars:
            raise RequestError("prompt", f"{len(request.prompt)} characters; one request takes {limits.max_chars}")
        if request.prompt_name is not None:
            raise RequestError("prompt_name", "given together with prompt; give one of them")
    check_prompt_name("prompt_name", request.prompt_name, prompts)


def check_prompt_name(field: str, name: str | None, prompts: Mapping[str, str]) -> None:
    """Refuse a name that the checkpoint does not have."""
    if name is not None and name not in prompts:
        raise RequestError(field, f"{shown(name)}; this checkpoint has: {', '.join(map(repr, sorted(prompts)))}")


def check_pool_factor(request: MultiVectorOptions) -> None:
    """Refuse what cannot be merged, and merging where it is not installed."""
    if request.pool_factor == 1:
        return
    if request.is_query:
        raise RequestError(
            "pool_factor", f"{request.pool_factor} with is_query; the vectors of queries are not merged"
        )
    if not token_pooling.available():
        raise RequestError(
            "pool_factor", "this server has no scipy; its operator can install vllm-factory[retrieval]"
        )


def check_rank_request(request: RankRequest, prompts: Mapping[str, str], limits: Limits) -> None:
    """Refuse documents that are too many or too long, and prompts that there are not."""
    check_ranking(request, limits)
    check_prompt_name("query_prompt_name", request.query_prompt_name, prompts)
    check_prompt_name("document_prompt_name", request.document_prompt_name, prompts)


def check_ranking(request: RankRequest | VisualRankRequest, limits: Limits) -> None:
    """Refuse documents that are too many, too long, or no Unicode."""
    check_unicode("query", request.query)
    if not request.documents:
        raise RequestError("documents", "an empty list; expected at least one document")
    if len(request.documents) > limits.max_texts:
        raise RequestError("documents", f"{len(request.documents)} documents; one request takes {limits.max_texts}")
    texts = request.texts
    total = len(request.query) + sum(len(text) for text in texts if text is not None)
    if total > limits.max_chars:
        raise RequestError("documents", f"{total} characters with the query; one request takes {limits.max_chars}")
    for index, text in enumerate(texts):
        if text is not None:
            check_unicode(f"documents[{index}]", text)


def usage(prompt_tokens: int) -> dict[str, int]:
    """What a request cost."""
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
