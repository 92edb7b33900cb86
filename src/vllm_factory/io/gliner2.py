"""The GLiNER2 pipeline: a schema and texts to prompts, candidates to results. No vLLM import.

A text is read as gliner2 2.1.0 reads it: with a full stop added where it ends without one, in lower case, and as
a whole. One that does not fit the model, and any for which a client asks so, is read in chunks, as the library's
``extract_long`` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_factory.errors import CheckpointError, RequestError
from vllm_factory.io.gliner2_decoding import Decoder, Reading, Results, View, format_results
from vllm_factory.io.gliner2_long import Chunk, Merger, chunks_of, without_details
from vllm_factory.io.gliner2_prompt import MARKERS, SchemaPrompt
from vllm_factory.io.gliner2_request import SEPARATORS, Gliner2Request, Schema, parse_gliner2_request
from vllm_factory.io.gliner2_words import gliner2_splitter
from vllm_factory.io.limits import Limits
from vllm_factory.io.pipeline import Encoded, Prompt
from vllm_factory.io.tokens import WordTokenizer
from vllm_factory.io.words import Word
from vllm_factory.poolers.gliner2 import Gliner2Pooler
from vllm_factory.poolers.gliner2_config import Gliner2Config

#: A prompt must have room for this many tokens of text, or the schema is refused as too long.
MIN_TEXT_TOKENS = 16
#: Words of a chunk when a text does not fit, halved until all chunks do.
CHUNK_WORDS = 384


@dataclass(slots=True)
class Passage:
    """Text of one prompt: with its full stop, its words, and where they begin among the prompt's words."""

    text: str
    words: list[Word]
    text_start: int


@dataclass(slots=True)
class TextState:
    """How one text was read; without chunks it is one passage."""

    text: str
    first_prompt: int
    passages: list[Passage] = field(default_factory=list)
    chunks: list[Chunk] | None = None
    truncated: bool = False


@dataclass(slots=True)
class Gliner2State:
    """What decoding needs of a request."""

    request: Gliner2Request
    schema: Schema
    prompt: SchemaPrompt
    texts: list[TextState]


class Gliner2Pipeline:
    """See :class:`~vllm_factory.io.pipeline.Pipeline`.

    Args:
        config: The head's configuration.
        tokenizer: The checkpoint's tokenizer.
        max_tokens: Tokens of one prompt (vLLM's ``max_model_len``).
        limits: Bounds on one request.
    """

    task = Gliner2Pooler.task
    blob_kind = Gliner2Pooler.blob_kind

    def __init__(self, config: Gliner2Config, tokenizer: WordTokenizer, max_tokens: int, limits: Limits) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.limits = limits
        self.split = gliner2_splitter()
        for marker in (*MARKERS, *SEPARATORS):
            if tokenizer.encode([marker]) != [(tokenizer.id_of(marker),)]:
                raise CheckpointError(f"{marker} is no token of the tokenizer; prepare the checkpoint again")

    def parse(self, data: Any) -> Gliner2Request:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        return parse_gliner2_request(data, self.limits)

    def encode(self, request: Gliner2Request) -> Encoded[Gliner2State]:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        schema = request.to_extract
        pools_words = self.config.token_pooling != "first"
        prompt = SchemaPrompt(schema, request.threshold, self.tokenizer, pools_words)
        if prompt.num_tokens + MIN_TEXT_TOKENS > self.max_tokens:
            raise RequestError(
                "labels" if request.schema_ is None else "schema",
                f"{prompt.num_tokens} tokens; with {MIN_TEXT_TOKENS} for text it may be "
                f"{self.max_tokens - MIN_TEXT_TOKENS}. Ask for less at once",
            )
        prompts: list[Prompt] = []
        texts = []
        for index, text in enumerate(request.texts):
            name = "text" if isinstance(request.text, str) else f"text[{index}]"
            texts.append(self._read(text, name, request, prompt, prompts))
        return Encoded(prompts, Gliner2State(request, schema, prompt, texts))

    def decode(self, state: Gliner2State, results: Sequence[Sequence[np.ndarray]], prompt_tokens: int) -> Any:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        request = state.request
        found = [self._results(state, text, results) for text in state.texts]
        single = isinstance(request.text, str)
        answer: Any = found[0] if single else found
        if not request.include_usage:
            return answer
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
        notes = [{"chunks": len(text.passages), "truncated": text.truncated} for text in state.texts]
        return {"result": answer, "usage": usage, "texts": notes[0] if single else notes}

    def _read(
        self, text: str, name: str, request: Gliner2Request, prompt: SchemaPrompt, prompts: list[Prompt]
    ) -> TextState:
        """Read a text and append its prompts."""
        state = TextState(text, len(prompts))
        room = self.max_tokens - prompt.num_tokens
        if request.chunk_size is not None:
            words = self.split(text)
            if len(words) - request.overlap > self.limits.max_texts * (request.chunk_size - request.overlap):
                raise RequestError(
                    "chunk_size",
                    f"{len(words)} words in chunks of {request.chunk_size} are more than the "
                    f"{self.limits.max_texts} chunks that a text may have",
                )
            state.chunks = chunks_of(text, words, request.chunk_size, request.overlap)
            read = [self._passage(chunk.text, request.chunk_size) for chunk in state.chunks]
            if any(_tokens(ids) > room for _, ids in read):
                raise RequestError(name, f"a chunk has more than the {room} tokens that fit; lower chunk_size")
        else:
            whole = self._passage(text, request.max_len)
            fits = _tokens(whole[1]) <= room
            read = [whole] if fits else self._shortened(state, whole, name, request, room)
        for passage, ids in read:
            ready = prompt.prompt(ids)
            passage.text_start = int(ready.arrays[-1][0])
            state.passages.append(passage)
            prompts.append(ready)
        return state

    def _passage(self, text: str, max_words: int | None) -> tuple[Passage, list[tuple[int, ...]]]:
        full = text if text.endswith((".", "!", "?")) else f"{text}."
        words = self.split(full)[:max_words]
        return Passage(full, words, 0), self.tokenizer.encode([word for word, _, _ in words])

    def _shortened(
        self,
        state: TextState,
        passage: tuple[Passage, list[tuple[int, ...]]],
        name: str,
        request: Gliner2Request,
        room: int,
    ) -> list[tuple[Passage, list[tuple[int, ...]]]]:
        """Passages of a text that does not fit, as the request's ``truncation`` says."""
        whole, ids = passage
        if request.truncation == "truncate":
            counts = np.cumsum([len(word) for word in ids])
            fitting = max(1, int(np.searchsorted(counts, room, side="right")))
            state.truncated = True
            return [(Passage(whole.text, whole.words[:fitting], 0), [word[:room] for word in ids[:fitting]])]
        if request.truncation == "window" and request.format_results and request.max_len is None:
            size, words = CHUNK_WORDS, self.split(state.text)
            while size:
                state.chunks = chunks_of(state.text, words, size, size // 6)
                read = [self._passage(chunk.text, size) for chunk in state.chunks]
                if all(_tokens(ids) <= room for _, ids in read):
                    return read
                size //= 2
        raise RequestError(
            name,
            f"{len(ids)} words, {_tokens(ids)} tokens; beside this schema the model reads {room} at once. Send "
            'less, or truncation "truncate", or "window" (which a single word that long, max_len, or '
            "format_results false rule out)",
        )

    def _results(self, state: Gliner2State, text: TextState, results: Sequence[Sequence[np.ndarray]]) -> Results:
        request = state.request
        chunked = text.chunks is not None
        view = View(
            confidence=chunked or request.include_confidence,
            spans=chunked or request.include_spans,
            policy=request.overlap_policy,
        )
        found = []
        for index, passage in enumerate(text.passages):
            arrays = results[text.first_prompt + index]
            reading = Reading(passage.text, passage.words, arrays, passage.text_start)
            raw = Decoder(state.schema, state.prompt, view, reading).results()
            found.append(format_results(raw, state.schema, view.confidence) if request.format_results else raw)
        if text.chunks is None:
            return found[0]
        scalars = {name for name, each in state.prompt.options.entities.items() if each.dtype == "str"}
        merged = Merger(text.text, request.overlap_policy or "disallow", scalars).merge(text.chunks, found)
        stripped: Results = without_details(merged, request.include_confidence, request.include_spans)
        return stripped


def _tokens(ids: Sequence[tuple[int, ...]]) -> int:
    return sum(map(len, ids))
