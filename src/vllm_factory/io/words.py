"""Splitting a text into words, as the checkpoint's ``words_splitter_type`` says."""

from __future__ import annotations

import re
from collections.abc import Callable

from vllm_factory.errors import UnsupportedError, shown

#: A word and the characters ``start:end`` of the text that it is.
Word = tuple[str, int, int]
Splitter = Callable[[str], list[Word]]

#: The splitters of gliner 0.2.29 that need libraries of their own.
LIBRARY_SPLITTERS = (
    "universal",
    "spacy",
    "mecab",
    "jieba",
    "hanlp",
    "janome",
    "camel",
    "hindi",
    "stanza",
)

# Runs of word characters, joined by single hyphens or underscores; every other visible character alone.
_WHITESPACE = re.compile(r"\w+(?:[-_]\w+)*|\S")


def split_whitespace(text: str) -> list[Word]:
    """The ``"whitespace"`` splitter: words with inner hyphens, and single symbols."""
    return [(match.group(), *match.span()) for match in _WHITESPACE.finditer(text)]


def splitter(kind: str) -> Splitter:
    """The splitter called ``kind`` in a ``gliner_config.json``.

    ``"whitespace"`` is built in. The others are the reference library's own, so that words are the same; they
    need ``vllm-factory[gliner]`` and the language's tokenizer.

    Raises:
        UnsupportedError: The kind is unknown, or what it needs is not installed.
    """
    if kind == "whitespace":
        return split_whitespace
    if kind not in LIBRARY_SPLITTERS:
        known = ", ".join(("whitespace", *LIBRARY_SPLITTERS))
        raise UnsupportedError(f"words_splitter_type {shown(kind)}; known are {known}")
    try:
        from gliner.data_processing.tokenizer import WordsSplitter
    except ImportError as error:
        raise UnsupportedError(
            f"words_splitter_type {shown(kind)} needs the reference library: pip install 'vllm-factory[gliner]'"
        ) from error
    try:
        split = WordsSplitter(kind)
    except ImportError as error:
        raise UnsupportedError(f"words_splitter_type {shown(kind)}: {error}") from error
    return lambda text: _checked(text, list(split(text)))


def _checked(text: str, words: list[Word]) -> list[Word]:
    """Words that really are at their place: some splitters report -1 for what they have normalised away."""
    return [(word, start, end) for word, start, end in words if 0 <= start < end <= len(text)]
