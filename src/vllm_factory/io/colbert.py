"""ColBERT as PyLate has it: how queries and documents become tokens, vectors, and rankings. No vLLM import.

Nothing of it is known here; everything stands in the checkpoint's files.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_factory.errors import CheckpointError, RequestError, shown
from vllm_factory.io.limits import Limits
from vllm_factory.io.multivector import MultiVectorPipeline, RankState, VectorsState, Written, written_text
from vllm_factory.io.ner import validated
from vllm_factory.io.retrieval import (
    MultiVectorTextRequest,
    RankRequest,
    check_pool_factor,
    check_rank_request,
    check_text_request,
)
from vllm_factory.io.texts import TextTokenizer, Tokens
from vllm_factory.published import SETTINGS_FILE, Published


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
    return checkpoint.within_positions(ColbertSettings.read(checkpoint).longest)


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

    @classmethod
    def hidden_by(cls, checkpoint: Published, settings: ColbertSettings) -> Expansion | None:
        """What nobody sees; ``None`` where queries are not filled up, or all tokens are seen.

        Raises:
            CheckpointError: As in :meth:`of`.
        """
        return cls.of(TextTokenizer.load(str(checkpoint.path))) if settings.hides_expansion else None

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


class ColbertPipeline(MultiVectorPipeline[MultiVectorTextRequest, RankRequest]):
    """Requests of a ColBERT; see :class:`~vllm_factory.io.pipeline.Pipeline`.

    Args:
        writer: The checkpoint's way of writing queries and documents.
        prompts: The checkpoint's prompts by name.
        default_prompt: The prompt of a request that names none.
        limits: Bounds on requests.
    """

    def __init__(self, writer: ColbertWriter, prompts: dict[str, str], default_prompt: str, limits: Limits) -> None:
        super().__init__(limits)
        self.writer = writer
        self.prompts = prompts
        self.default_prompt = default_prompt

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

    def write(self, request: MultiVectorTextRequest) -> VectorsState[MultiVectorTextRequest]:
        """See :class:`~vllm_factory.io.multivector.MultiVectorPipeline`."""
        prompt = request.prompt if request.prompt is not None else self._prompt(request.prompt_name)
        items = [
            self._written("text" if request.single else f"text[{index}]", text, request.is_query, prompt)
            for index, text in enumerate(request.texts)
        ]
        return VectorsState(request, tuple(items), request.single)

    def write_ranking(self, request: RankRequest) -> RankState[RankRequest]:
        """See :class:`~vllm_factory.io.multivector.MultiVectorPipeline`."""
        query = self._written("query", request.query, True, self._prompt(request.query_prompt_name))
        before = self._prompt(request.document_prompt_name)
        documents = [
            self._written(f"documents[{index}]", text, False, before)
            for index, text in enumerate(request.documents)
        ]
        return RankState(request, query, tuple(documents), request.texts)

    def _written(self, field: str, text: str, is_query: bool, prompt: str) -> Written:
        try:
            tokens = self.writer.tokens(text, is_query=is_query, prompt=prompt)
        except RequestError as error:
            raise RequestError(field, error.problem) from error
        return written_text(text, tokens, self.writer.tokenizer, self.writer.skipped(tokens, is_query=is_query))

    def _prompt(self, name: str | None) -> str:
        return self.default_prompt if name is None else self.prompts[name]
