"""The GLiNER pipeline: labels and words to prompts, candidates to entities. No vLLM import.

A prompt is what gliner 0.2.29 builds (``data_processing/processor.py``): for each label its marker token and its
text, then the separator, then the words of the text, every one of them tokenized as a word of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from vllm_factory.errors import CheckpointError, RequestError, shown
from vllm_factory.io.decoding import resolve_overlaps
from vllm_factory.io.limits import Limits
from vllm_factory.io.ner import NerRequest, TextsRequest, entity, ner_response, parse_ner_request
from vllm_factory.io.pipeline import Encoded, Prompt
from vllm_factory.io.tokens import WordTokenizer
from vllm_factory.io.windows import Window, windows
from vllm_factory.io.words import Splitter, Word, splitter
from vllm_factory.poolers.gliner import GlinerPooler
from vllm_factory.poolers.gliner_config import GlinerConfig
from vllm_factory.poolers.selection import Selection

#: Words that neighbouring windows share at least; wider spans of a checkpoint raise it.
MIN_OVERLAP = 32
#: A window must have room for this many tokens of text, or the labels are refused as too long.
MIN_TEXT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LabelPrompt:
    """The part of a prompt in front of the text.

    Attributes:
        token_ids: Without the special tokens at the beginning of the sequence.
        arrays: What the pooler gets of the labels: for each one the token that represents it, counted from the
            sequence's beginning.
        unseen_words: Prompt words without any token. The library counts words that have tokens, but skips as
            many as the prompt has words, so this many words of the text are taken for part of the prompt.
        num_labels: How many.
    """

    token_ids: list[int]
    arrays: tuple[np.ndarray, ...]
    unseen_words: int
    num_labels: int


#: How the candidates of one window of a text are chosen.
Select = Callable[[Window], Selection]


@dataclass(slots=True)
class TextState:
    """How one text was read: its words, and which prompts hold which of them."""

    text: str
    words: list[Word]
    windows: list[Window]
    first_prompt: int
    truncated: bool = False


@dataclass(slots=True)
class GlinerState:
    """What decoding needs of a request."""

    request: NerRequest
    texts: list[TextState]


class GlinerPipeline:
    """See :class:`~vllm_factory.io.pipeline.Pipeline`.

    Args:
        config: The head's configuration.
        tokenizer: The checkpoint's tokenizer.
        max_tokens: Tokens of one prompt (vLLM's ``max_model_len``).
        tokenizer_max_length: Tokens at which the library's own tokenizer call cuts a prompt.
        limits: Bounds on one request.
    """

    task = GlinerPooler.task
    blob_kind = GlinerPooler.blob_kind

    def __init__(
        self,
        config: GlinerConfig,
        tokenizer: WordTokenizer,
        max_tokens: int,
        tokenizer_max_length: int,
        limits: Limits,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.cut_tokens = min(max_tokens, tokenizer_max_length)
        self.limits = limits
        self.split: Splitter = splitter(config.words_splitter_type)
        self.overlap = MIN_OVERLAP if config.token_level else max(MIN_OVERLAP, config.max_width)
        self._read_markers()

    def _read_markers(self) -> None:
        config = self.config
        marker, separator = self.tokenizer.encode([config.ent_token, config.sep_token])
        if marker != (config.class_token_index,):
            raise CheckpointError(f"{shown(config.ent_token)} is {marker}, not token {config.class_token_index}")
        self._marker, self._separator = marker, separator
        # Text that would be read as a marker: exact pieces of the vocabulary.
        self._reserved = {config.class_token_index, *(separator if len(separator) == 1 else ())}

    def parse(self, data: Any) -> NerRequest:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        return parse_ner_request(data, self.limits)

    def encode(self, request: NerRequest) -> Encoded[GlinerState]:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        labels = self._label_prompt(request.label_prompts)
        prompts: list[Prompt] = []
        texts = []
        for index, text in enumerate(request.texts):
            field = "text" if isinstance(request.text, str) else f"text[{index}]"
            state = self._read(text, field, request, labels, prompts)
            texts.append(state)
        # Texts without words need no engine, but vLLM wants a prompt for every request.
        if not prompts:
            prompts.append(self._prompt(labels, [], request.threshold))
        return Encoded(prompts, GlinerState(request, texts))

    def decode(self, state: GlinerState, results: Sequence[Sequence[np.ndarray]], prompt_tokens: int) -> Any:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        entities = [self._entities(state.request, text, results) for text in state.texts]
        notes = [{"windows": len(text.windows), "truncated": text.truncated} for text in state.texts]
        return ner_response(state.request, entities, prompt_tokens, notes)

    def _label_prompt(self, label_prompts: Sequence[str], field: str = "labels") -> LabelPrompt:
        # An empty label is its marker alone.
        encoded = [
            ids if label else None
            for label, ids in zip(label_prompts, self._encode_labels(label_prompts, field), strict=True)
        ]
        token_ids: list[int] = []
        label_tokens = []
        for ids in encoded:
            label_tokens.append(len(self.tokenizer.prefix) + len(token_ids) + (not self.config.embed_ent_token))
            token_ids += [*self._marker, *(ids or ())]
        token_ids += self._separator
        available = self.max_tokens - len(self.tokenizer.prefix) - len(self.tokenizer.suffix)
        if len(token_ids) + MIN_TEXT_TOKENS > available:
            raise RequestError(
                field,
                f"{len(label_prompts)} labels are {len(token_ids)} tokens; with {MIN_TEXT_TOKENS} for text "
                f"they may be {available - MIN_TEXT_TOKENS}. Send fewer or shorter labels",
            )
        unseen = sum(ids == () for ids in encoded) + (not self._separator)
        return LabelPrompt(token_ids, (np.array(label_tokens, np.int32),), unseen, len(encoded))

    def _encode_labels(self, label_prompts: Sequence[str], field: str) -> list[tuple[int, ...]]:
        encoded = self.tokenizer.encode(label_prompts)
        for index, (label, ids) in enumerate(zip(label_prompts, encoded, strict=True)):
            if not self._reserved.isdisjoint(ids):
                raise RequestError(
                    f"{field}[{index}]",
                    f"{shown(label)} contains a marker of the model ({self.config.ent_token} or "
                    f"{self.config.sep_token}); leave it out",
                )
        return encoded

    def _read(
        self,
        text: str,
        field: str,
        request: TextsRequest,
        labels: LabelPrompt,
        prompts: list[Prompt],
        select: Select | None = None,
    ) -> TextState:
        """Split a text and append its prompts."""
        words = self.split(text)
        state = TextState(text, words, [], len(prompts))
        if not words:
            return state
        ids = self.tokenizer.encode([word for word, _, _ in words])
        self._place_windows(state, ids, field, request, labels)
        limit = self.cut_tokens if request.truncation == "truncate" else self.max_tokens
        room = self._room(limit, labels)
        for window in state.windows:
            window_ids = ids[window.start : window.end]
            cut, was_cut = _cut(window_ids, room)
            state.truncated |= was_cut
            selection = (select(window).pack(),) if select else ()
            prompts.append(self._prompt(labels, cut, request.threshold, selection))
        return state

    def _room(self, max_tokens: int, labels: LabelPrompt) -> int:
        """Tokens of text that fit behind the labels."""
        specials = len(self.tokenizer.prefix) + len(self.tokenizer.suffix)
        return max(0, max_tokens - specials - len(labels.token_ids))

    def _place_windows(
        self,
        state: TextState,
        ids: list[tuple[int, ...]],
        field: str,
        request: TextsRequest,
        labels: LabelPrompt,
    ) -> None:
        """Decide which words each prompt gets."""
        max_words = self.config.max_len
        if request.truncation == "truncate":
            state.windows = [Window(0, min(len(ids), max_words))]
            state.truncated = len(ids) > max_words
            return
        counts = [len(word) for word in ids]
        room = self._room(self.max_tokens, labels)
        # Words that the library would take for part of the prompt cost nothing but their tokens.
        state.windows = windows(counts, max_words=max_words, max_tokens=room, overlap=self.overlap)
        if request.truncation == "error" and (len(state.windows) > 1 or sum(counts) > room):
            raise RequestError(
                field,
                f"{len(ids)} words, {sum(counts)} tokens; the model reads {max_words} words and {room} tokens "
                'at once. Send less, or truncation "window" or "truncate"',
            )

    def _prompt(
        self,
        labels: LabelPrompt,
        ids: list[tuple[int, ...]],
        threshold: float,
        selection: tuple[np.ndarray, ...] = (),
    ) -> Prompt:
        prefix, suffix = self.tokenizer.prefix, self.tokenizer.suffix
        first = len(prefix) + len(labels.token_ids)
        token_ids = [*prefix, *labels.token_ids]
        for word in ids:
            token_ids += word
        token_ids += suffix
        words = self._word_tokens([len(word) for word in ids], first, labels.unseen_words)
        return Prompt(token_ids, (np.array([threshold], np.float32), *labels.arrays, words, *selection))

    def _word_tokens(self, counts: list[int], first: int, skipped: int) -> np.ndarray:
        """Tokens of each word as the pooler wants them; see :mod:`vllm_factory.poolers.gliner`.

        As in the library, the n-th vector belongs to the n-th word *that has tokens*: behind a word without
        tokens everything moves up by one, and the last words of the text get none.
        """
        starts = list(accumulate(counts, initial=first))
        seen = [i for i, count in enumerate(counts) if count][skipped:]
        if self.config.sends_word_bounds:
            bounds = [starts[i] for i in seen]
            end = starts[seen[-1] + 1] if seen else first
            return np.array(bounds + [end] * (len(counts) - len(seen) + 1), np.int32)
        offset = 0 if self.config.subtoken_pooling == "first" else -1
        token = [starts[i - offset] + offset for i in seen]
        return np.array(token + [-1] * (len(counts) - len(seen)), np.int32)

    def _entities(
        self, request: NerRequest, state: TextState, results: Sequence[Sequence[np.ndarray]]
    ) -> list[dict[str, Any]]:
        found = [results[state.first_prompt + i] for i in range(len(state.windows))]
        if not found:
            return []
        start, end, label, score = (
            found[0] if len(found) == 1 else merge_windows(found, state.windows, self.config.token_level)
        )
        names = request.label_names
        keep = resolve_overlaps(start, end, score, flat=request.flat_ner, multi_label=request.multi_label)
        return [
            entity(
                state.text,
                names[label[i]],
                float(score[i]),
                state.words[start[i]][1],
                state.words[end[i]][2],
            )
            for i in keep
        ]


def merge_windows(
    found: Sequence[Sequence[np.ndarray]], placed: Sequence[Window], token_level: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Candidates of all windows of a text, in words of the text.

    A candidate that two windows found counts once, with the higher score: the window that sees more of its
    surroundings is usually the more certain one. The order is that of a single window.
    """
    start, end, label, score = (np.concatenate([window[i] for window in found]) for i in range(4))
    offset = np.repeat([window.start for window in placed], [len(window[0]) for window in found])
    start, end = start + offset, end + offset
    keys = (-score, end, label, start) if token_level else (-score, label, end, start)
    order = np.lexsort(keys)
    span = np.stack([start, end, label])[:, order]
    first = np.ones(len(order), bool)
    first[1:] = np.any(span[:, 1:] != span[:, :-1], axis=0)
    chosen = order[first]
    return start[chosen], end[chosen], label[chosen], score[chosen]


def _cut(ids: list[tuple[int, ...]], room: int) -> tuple[list[tuple[int, ...]], bool]:
    """The first ``room`` tokens; words behind them stay, without tokens."""
    total = 0
    for index, word in enumerate(ids):
        if total + len(word) > room:
            rest: list[tuple[int, ...]] = [()] * (len(ids) - index - 1)
            return [*ids[:index], word[: room - total], *rest], True
        total += len(word)
    return ids, False
