"""Requests for one vector a token, and for rankings by MaxSim: what all such plugins share. No vLLM import.

A plugin says how texts and images become tokens (:class:`Written`); prompts, roles, scores and answers are the same
for all. Shapes: M query vectors, L document vectors.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from vllm_factory.errors import RequestError
from vllm_factory.io.limits import Limits
from vllm_factory.io.pipeline import Encoded, Prompt
from vllm_factory.io.retrieval import MultiVectorOptions, RankOptions, usage
from vllm_factory.io.texts import TextTokenizer, Tokens
from vllm_factory.io.token_pooling import pool_tokens
from vllm_factory.io.vectors import unpacked, vector_item
from vllm_factory.poolers.multivector import MultiVectorPooler, Role

VectorsT = TypeVar("VectorsT", bound=MultiVectorOptions)
RankT = TypeVar("RankT", bound=RankOptions)
_KEY_BITS = 63
_NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A text or an image as the engine gets it.

    Attributes:
        token_ids: Its tokens; an image is one of them, which vLLM expands.
        num_tokens: Tokens that the engine sees.
        pieces: For each of those: its ``text``, and where that is in what the client sent.
        skipped: Indices of those that get no vector, ``[S]`` int32, ascending.
        truncated: Whether the text had more tokens.
        image: The picture, or ``None``.
    """

    token_ids: list[int]
    num_tokens: int
    pieces: Callable[[], list[dict[str, Any]]]
    skipped: np.ndarray
    truncated: bool
    image: Any = None

    def prompt(self, role: Role, key: int) -> Prompt:
        """For the engine."""
        head = np.array([role, key, self.num_tokens], np.int64)
        return Prompt(self.token_ids, (head, self.skipped), self.image)

    def kept_pieces(self) -> list[dict[str, Any]]:
        """The pieces of the tokens that have a vector."""
        skipped = set(self.skipped.tolist())
        return [piece for index, piece in enumerate(self.pieces()) if index not in skipped]


def written_text(text: str, tokens: Tokens, tokenizer: TextTokenizer, skipped: np.ndarray = _NOTHING) -> Written:
    """A tokenized text; tokens that are not the client's have no place in it."""

    def pieces() -> list[dict[str, Any]]:
        found = []
        for token_id, span in zip(tokens.ids, tokens.spans, strict=True):
            start, end = span or (None, None)
            piece = tokenizer.token(token_id) if span is None else text[start:end]
            found.append({"text": piece, "start": start, "end": end})
        return found

    return Written(
        token_ids=tokens.ids,
        num_tokens=len(tokens.ids),
        pieces=pieces,
        skipped=skipped,
        truncated=tokens.truncated,
    )


@dataclass(frozen=True, slots=True)
class VectorsState(Generic[VectorsT]):
    """What decoding needs of a request for vectors."""

    request: VectorsT
    items: tuple[Written, ...]
    single: bool


@dataclass(frozen=True, slots=True)
class RankState(Generic[RankT]):
    """What decoding needs of a ranking."""

    request: RankT
    query: Written
    documents: tuple[Written, ...]
    texts: list[str | None]


State = VectorsState[Any] | RankState[Any]


class MultiVectorPipeline(ABC, Generic[VectorsT, RankT]):
    """See :class:`~vllm_factory.io.pipeline.Pipeline`.

    Args:
        limits: Bounds on requests.
    """

    blob_kind = MultiVectorPooler.blob_kind
    task = MultiVectorPooler.task

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    @abstractmethod
    def parse(self, data: Any) -> VectorsT | RankT:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""

    @abstractmethod
    def write(self, request: VectorsT) -> VectorsState[VectorsT]:
        """What was sent for vectors, as the engine gets it.

        Raises:
            RequestError: It does not fit this model.
        """

    @abstractmethod
    def write_ranking(self, request: RankT) -> RankState[RankT]:
        """What was sent for a ranking, as the engine gets it.

        Raises:
            RequestError: It does not fit this model.
        """

    def encode(self, request: VectorsT | RankT) -> Encoded[State]:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        if not isinstance(request, RankOptions):
            vectors = self.write(request)
            return Encoded([item.prompt(Role.VECTORS, 0) for item in vectors.items], vectors)
        key = secrets.randbits(_KEY_BITS)
        state = self.write_ranking(request)
        if request.similarity:
            self._check_similarities(request, state)
        # Similarities need the vectors here; a score needs them nowhere but on the device.
        role = Role.VECTORS if request.similarity else Role.DOCUMENT
        prompts = [state.query.prompt(Role.QUERY, key), *(item.prompt(role, key) for item in state.documents)]
        return Encoded(prompts, state)

    def decode(self, state: State, results: Sequence[Sequence[np.ndarray]], prompt_tokens: int) -> dict[str, Any]:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        arrays = [unpacked(list(result)) for result in results]
        if isinstance(state, RankState):
            return _ranking(state, arrays, prompt_tokens)
        items = [_item(state.request, array, item) for array, item in zip(arrays, state.items, strict=True)]
        return {"embeddings": items[0] if state.single else items, "usage": usage(prompt_tokens)}

    def _check_similarities(self, request: RankOptions, state: RankState[RankT]) -> None:
        lengths = sorted((document.num_tokens for document in state.documents), reverse=True)
        numbers = state.query.num_tokens * sum(lengths[: request.top_n])
        if numbers > self.limits.max_similarities:
            raise RequestError(
                "similarity",
                f"up to {numbers} numbers; one request takes {self.limits.max_similarities}: "
                "send fewer documents, or a smaller top_n",
            )


def _item(request: MultiVectorOptions, vectors: np.ndarray, written: Written) -> dict[str, Any]:
    if request.pool_factor > 1:
        vectors = pool_tokens(vectors, request.pool_factor)
    item = vector_item(vectors, request.output, request.dtype)
    return {**item, "tokens": written.num_tokens, "truncated": written.truncated}


def _ranking(state: RankState[Any], arrays: list[np.ndarray], prompt_tokens: int) -> dict[str, Any]:
    request, query = state.request, arrays[0]
    scores = [_score(query, array) for array in arrays[1:]]
    # Stable: documents of equal score stay in the order given.
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    results = []
    for index in order:
        document = state.documents[index]
        result: dict[str, Any] = {"index": index, "score": scores[index]}
        if request.return_documents:
            result["document"] = state.texts[index]
        result["truncated"] = document.truncated
        if request.similarity:
            matrix = query @ arrays[index + 1].T
            result["similarity"] = vector_item(matrix, request.output, request.dtype)
            result["tokens"] = document.kept_pieces()
        results.append(result)
    about: dict[str, Any] = {"truncated": state.query.truncated}
    if request.similarity:
        about["tokens"] = state.query.kept_pieces()
    return {"results": results, "query": about, "usage": usage(prompt_tokens)}


def _score(query: np.ndarray, document: np.ndarray) -> float:
    """MaxSim of ``[M, D]`` with ``[L, D]``; the pooler's own number where it has scored the document already."""
    if document.ndim == 0:
        return float(document)
    if not document.shape[0]:
        return 0.0
    return float((query @ document.T).max(axis=1).sum(dtype=np.float32))
