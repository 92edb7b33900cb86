"""ColBERT as PyLate has it: how queries and documents become tokens, vectors, and rankings. No vLLM import.

Nothing of it is known here; everything stands in the checkpoint's files. Shapes: M query vectors, L document
vectors.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_factory.errors import CheckpointError, RequestError, shown
from vllm_factory.io.limits import Limits
from vllm_factory.io.ner import validated
from vllm_factory.io.pipeline import Encoded, Prompt
from vllm_factory.io.retrieval import (
    MultiVectorTextRequest,
    RankRequest,
    check_pool_factor,
    check_rank_request,
    check_text_request,
    usage,
)
from vllm_factory.io.texts import TextTokenizer, Tokens
from vllm_factory.io.token_pooling import pool_tokens
from vllm_factory.io.vectors import unpacked, vector_item
from vllm_factory.poolers.multivector import MultiVectorPooler, Role
from vllm_factory.published import SETTINGS_FILE, Published

_KEY_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class ColbertSettings:
    """What PyLate saves in ``config_sentence_transformers.json``, with its defaults for what is absent.

    Attributes:
        query_prefix, document_prefix: A token behind the first one; ``""`` for none.
        query_length, document_length: Most tokens, prefix included.
        do_query_expansion: Queries are filled up to their length with the tokenizer's mask token.
        attend_to_expansion_tokens: Those tokens are attended to; else they get vectors, and nobody sees them.
        skiplist_words: Tokens of documents that get no vector.
        lower: Texts are lower-cased first.
    """

    query_prefix: str = "[Q] "
    document_prefix: str = "[D] "
    query_length: int = 32
    document_length: int = 180
    do_query_expansion: bool = True
    attend_to_expansion_tokens: bool = False
    skiplist_words: tuple[str, ...] = tuple(string.punctuation)
    lower: bool = False

    @classmethod
    def read(cls, checkpoint: Published) -> ColbertSettings:
        """From the checkpoint's files.

        Raises:
            CheckpointError: A setting has another type than PyLate's.
        """
        saved = checkpoint.settings()
        given: dict[str, Any] = {
            key: saved[key] for key in cls.__slots__ if key != "lower" and saved.get(key) is not None
        }
        for key, value in given.items():
            kind = list if key == "skiplist_words" else type(getattr(cls(), key))
            if type(value) is not kind or (isinstance(value, int) and key.endswith("length") and value < 1):
                raise CheckpointError(f"{checkpoint.name}: {SETTINGS_FILE}: {key} is {shown(value)}")
        if "skiplist_words" in given:
            given["skiplist_words"] = tuple(map(str, given["skiplist_words"]))
        return cls(**given, lower=bool(checkpoint.transformer_settings().get("do_lower_case", False)))

    @property
    def hides_expansion(self) -> bool:
        """Whether expansion tokens must not be attended to."""
        return self.do_query_expansion and not self.attend_to_expansion_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.query_length, self.document_length)


def longest_prompt(checkpoint: Published) -> int:
    """Tokens of the longest prompt that the checkpoint asks for and its backbone has positions for.

    vLLM itself would read ``max_seq_length``, in which PyLate leaves whatever it tokenized last.
    """
    positions = checkpoint.table("config.json").get("max_position_embeddings")
    longest = ColbertSettings.read(checkpoint).longest
    return min(longest, positions) if isinstance(positions, int) else longest


@dataclass(frozen=True, slots=True)
class Expansion:
    """What fills queries up.

    Attributes:
        token: Its id.
        spared: How many of the tokens that end every text are this token, too, and no expansion.
        ends_text: Whether nothing else ends every text: then a text could end in the token as well.
    """

    token: int
    spared: int
    ends_text: bool

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Expansion:
        """As PyLate chooses the token: the mask token, else the end token, else padding.

        Raises:
            CheckpointError: The tokenizer has none of them.
        """
        ending = tokenizer.ending()
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(tokenizer.tokenizer, name, None)
            if token is not None:
                spared = next((n for n, each in enumerate(reversed(ending)) if each != token), len(ending))
                return cls(int(token), spared, spared == len(ending))
        raise CheckpointError("the checkpoint's tokenizer has no mask, end or padding token to expand queries with")

    def follows(self, ids: Sequence[int]) -> bool:
        """Whether a text's tokens, not filled up yet, end in what could not be told from an expansion."""
        content = ids[: len(ids) - self.spared]
        return self.ends_text and bool(content) and content[-1] == self.token


class ColbertWriter:
    """Tokens of queries and documents.

    Args:
        settings: The checkpoint's.
        tokenizer: The checkpoint's.
        max_tokens: Most tokens of a prompt that the server takes. Documents are cut there; queries must fit.

    Raises:
        CheckpointError: A prefix is no token, or the query length does not fit the server.
    """

    def __init__(self, settings: ColbertSettings, tokenizer: TextTokenizer, max_tokens: int) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.expansion = Expansion.of(tokenizer)
        if settings.query_length > max_tokens:
            raise CheckpointError(
                f"query_length is {settings.query_length}, the server takes {max_tokens} tokens; "
                f"start it with --max-model-len {settings.longest} (vllm-factory-serve does)"
            )
        if settings.do_query_expansion and getattr(tokenizer.tokenizer, "padding_side", "right") != "right":
            raise CheckpointError("the tokenizer pads on the left, where query expansion is not supported")
        self._lengths = {True: settings.query_length, False: min(settings.document_length, max_tokens)}
        self._prefixes = {
            True: self._prefix("query_prefix", settings.query_prefix),
            False: self._prefix("document_prefix", settings.document_prefix),
        }
        # An unknown word stands for the unknown token, which is then skipped as well: as in PyLate.
        self._skipped = np.array(
            [i for word in settings.skiplist_words if (i := tokenizer.id_of(word)) is not None], np.int64
        )

    def tokens(self, text: str, *, is_query: bool, prompt: str = "") -> Tokens:
        """Tokens of one text, prefix and expansion included.

        Raises:
            RequestError: Nothing is left to read, or the text ends in what only the expansion may.
        """
        prefix, length = self._prefixes[is_query], self._lengths[is_query]
        tokens = self.tokenizer.encode(text, length - (prefix is not None), prompt)
        expands = is_query and self.settings.do_query_expansion
        if self.settings.hides_expansion and self.expansion.follows(tokens.ids):
            token = shown(self.tokenizer.token(self.expansion.token))
            raise RequestError("text", f"ends with {token}, which only query expansion may")
        if expands:
            tokens = tokens.padded(length - (prefix is not None), self.expansion.token)
        if prefix is not None:
            tokens = tokens.with_token(1, prefix)
        if not tokens.ids:
            raise RequestError("text", f"{shown(text)} has no token")
        return tokens

    def skipped(self, tokens: Tokens, *, is_query: bool) -> np.ndarray:
        """Indices of the tokens that get no vector, ``[S]`` int32."""
        if is_query:
            return np.empty(0, np.int32)
        return np.flatnonzero(np.isin(tokens.ids, self._skipped)).astype(np.int32)

    def _prefix(self, name: str, prefix: str) -> int | None:
        if not prefix:
            return None
        if prefix not in self.tokenizer:
            raise CheckpointError(
                f"{name} {shown(prefix)} is no token of the checkpoint's tokenizer, so it has no trained "
                "embedding; save the model with PyLate once more"
            )
        return self.tokenizer.id_of(prefix)


@dataclass(frozen=True, slots=True)
class TextsState:
    """What decoding needs of a request for vectors."""

    request: MultiVectorTextRequest
    tokens: tuple[Tokens, ...]


@dataclass(frozen=True, slots=True)
class RankState:
    """What decoding needs of a ranking: the query's tokens come first."""

    request: RankRequest
    tokens: tuple[Tokens, ...]
    skipped: tuple[np.ndarray, ...]


class ColbertPipeline:
    """Requests of a ColBERT; see :class:`~vllm_factory.io.pipeline.Pipeline`.

    Args:
        writer: The checkpoint's way of writing queries and documents.
        prompts: The checkpoint's prompts by name.
        default_prompt: The prompt of a request that names none.
        limits: Bounds on requests.
    """

    blob_kind = MultiVectorPooler.blob_kind
    task = MultiVectorPooler.task

    def __init__(self, writer: ColbertWriter, prompts: dict[str, str], default_prompt: str, limits: Limits) -> None:
        self.writer = writer
        self.prompts = prompts
        self.default_prompt = default_prompt
        self.limits = limits

    @classmethod
    def read(cls, model: str, revision: str | None, max_tokens: int, limits: Limits) -> ColbertPipeline:
        """The pipeline of a published checkpoint, a directory or a hub id."""
        checkpoint = Published.open(model, revision)
        settings = ColbertSettings.read(checkpoint)
        tokenizer = TextTokenizer.load(str(checkpoint.path), lower=settings.lower)
        writer = ColbertWriter(settings, tokenizer, max_tokens)
        return cls(writer, checkpoint.prompts(), checkpoint.default_prompt(), limits)

    def parse(self, data: Any) -> MultiVectorTextRequest | RankRequest:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        if isinstance(data, dict) and ("query" in data or "documents" in data):
            ranking = validated(RankRequest, data, "an object with query and documents")
            check_rank_request(ranking, self.prompts, self.limits)
            return ranking
        request = validated(MultiVectorTextRequest, data, "an object with text, or query and documents")
        check_text_request(request, self.prompts, self.limits)
        check_pool_factor(request)
        return request

    def encode(self, request: MultiVectorTextRequest | RankRequest) -> Encoded[TextsState | RankState]:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        return self._encode_ranking(request) if isinstance(request, RankRequest) else self._encode_texts(request)

    def decode(
        self, state: TextsState | RankState, results: Sequence[Sequence[np.ndarray]], prompt_tokens: int
    ) -> dict[str, Any]:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        arrays = [unpacked(list(result)) for result in results]
        if isinstance(state, RankState):
            return self._ranking(state, arrays, prompt_tokens)
        items = [
            self._item(state.request, array, tokens) for array, tokens in zip(arrays, state.tokens, strict=True)
        ]
        single = isinstance(state.request.text, str)
        return {"embeddings": items[0] if single else items, "usage": usage(prompt_tokens)}

    def _encode_texts(self, request: MultiVectorTextRequest) -> Encoded[TextsState | RankState]:
        prompt = request.prompt if request.prompt is not None else self._prompt(request.prompt_name)
        tokens, prompts = [], []
        for index, text in enumerate(request.texts):
            field = "text" if isinstance(request.text, str) else f"text[{index}]"
            written = self._tokens(field, text, request.is_query, prompt)
            skipped = self.writer.skipped(written, is_query=request.is_query)
            tokens.append(written)
            prompts.append(_prompt(written, Role.VECTORS, 0, skipped))
        return Encoded(prompts, TextsState(request, tuple(tokens)))

    def _encode_ranking(self, request: RankRequest) -> Encoded[TextsState | RankState]:
        key = secrets.randbits(_KEY_BITS)
        query = self._tokens("query", request.query, True, self._prompt(request.query_prompt_name))
        before = self._prompt(request.document_prompt_name)
        documents = [
            self._tokens(f"documents[{index}]", text, False, before) for index, text in enumerate(request.documents)
        ]
        if request.similarity:
            self._check_similarities(request, query, documents)
        skipped = [self.writer.skipped(document, is_query=False) for document in documents]
        # Similarities need the vectors here; a score needs them nowhere but on the device.
        role = Role.VECTORS if request.similarity else Role.DOCUMENT
        prompts = [_prompt(query, Role.QUERY, key, np.empty(0, np.int32))]
        prompts += [_prompt(d, role, key, s) for d, s in zip(documents, skipped, strict=True)]
        nothing = np.empty(0, np.int32)
        return Encoded(prompts, RankState(request, (query, *documents), (nothing, *skipped)))

    def _check_similarities(self, request: RankRequest, query: Tokens, documents: list[Tokens]) -> None:
        lengths = sorted((len(document.ids) for document in documents), reverse=True)
        numbers = len(query.ids) * sum(lengths[: request.top_n])
        if numbers > self.limits.max_similarities:
            raise RequestError(
                "similarity",
                f"up to {numbers} numbers; one request takes {self.limits.max_similarities}: "
                "send fewer documents, or a smaller top_n",
            )

    def _tokens(self, field: str, text: str, is_query: bool, prompt: str) -> Tokens:
        try:
            return self.writer.tokens(text, is_query=is_query, prompt=prompt)
        except RequestError as error:
            raise RequestError(field, error.problem) from error

    def _prompt(self, name: str | None) -> str:
        return self.default_prompt if name is None else self.prompts[name]

    def _item(self, request: MultiVectorTextRequest, vectors: np.ndarray, tokens: Tokens) -> dict[str, Any]:
        if request.pool_factor > 1:
            vectors = pool_tokens(vectors, request.pool_factor)
        item = vector_item(vectors, request.output, request.dtype)
        return {**item, "tokens": len(tokens.ids), "truncated": tokens.truncated}

    def _ranking(self, state: RankState, arrays: list[np.ndarray], prompt_tokens: int) -> dict[str, Any]:
        request, query = state.request, arrays[0]
        scores = [_score(query, array) for array in arrays[1:]]
        # Stable: documents of equal score stay in the order given.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
        results = []
        for index in order:
            result: dict[str, Any] = {"index": index, "score": scores[index]}
            if request.return_documents:
                result["document"] = request.documents[index]
            result["truncated"] = state.tokens[index + 1].truncated
            if request.similarity:
                matrix = query @ arrays[index + 1].T
                result["similarity"] = vector_item(matrix, request.output, request.dtype)
                result["tokens"] = self._token_texts(request.documents[index], state, index + 1)
            results.append(result)
        about: dict[str, Any] = {"truncated": state.tokens[0].truncated}
        if request.similarity:
            about["tokens"] = self._token_texts(request.query, state, 0)
        return {"results": results, "query": about, "usage": usage(prompt_tokens)}

    def _token_texts(self, text: str, state: RankState, index: int) -> list[dict[str, Any]]:
        """Text and place of each token that has a vector; tokens that are not the client's have no place."""
        tokens, skipped = state.tokens[index], set(state.skipped[index].tolist())
        found = []
        for position, (token_id, span) in enumerate(zip(tokens.ids, tokens.spans, strict=True)):
            if position in skipped:
                continue
            start, end = span or (None, None)
            piece = self.writer.tokenizer.token(token_id) if span is None else text[start:end]
            found.append({"text": piece, "start": start, "end": end})
        return found


def _prompt(tokens: Tokens, role: Role, key: int, skipped: np.ndarray) -> Prompt:
    return Prompt(tokens.ids, (np.array([role, key, len(tokens.ids)], np.int64), skipped))


def _score(query: np.ndarray, document: np.ndarray) -> float:
    """MaxSim of ``[M, D]`` with ``[L, D]``; the pooler's own number where it has scored the document already."""
    if document.ndim == 0:
        return float(document)
    if not document.shape[0]:
        return 0.0
    return float((query @ document.T).max(axis=1).sum(dtype=np.float32))
