"""Cutting a long text into windows of whole words.

A window holds at most ``max_words`` words and ``max_tokens`` tokens. The next one begins ``overlap`` words
before the end of the last, so that an entity of up to ``overlap`` words is whole in at least one of them. A
single word with more tokens than a window gets one of its own, and only its first tokens are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Words ``start:end`` of a text."""

    start: int
    end: int


def windows(token_counts: Sequence[int], *, max_words: int, max_tokens: int, overlap: int) -> list[Window]:
    """Windows that cover all words of a text, in order.

    Args:
        token_counts: Tokens of each word.
        max_words, max_tokens: Bounds of one window, both at least 1.
        overlap: Words that two neighbours share; fewer where a window is not longer than that.
    """
    result: list[Window] = []
    start = 0
    while start < len(token_counts) or not result:
        end = _window_end(token_counts, start, max_words, max_tokens)
        result.append(Window(start, end))
        if end >= len(token_counts):
            break
        # Half a window of progress at least, or a large overlap would multiply the work.
        start = max(end - overlap, start + max(1, (end - start) // 2))
    return result


def _window_end(token_counts: Sequence[int], start: int, max_words: int, max_tokens: int) -> int:
    end, tokens = start, 0
    last = min(len(token_counts), start + max_words)
    while end < last and (end == start or tokens + token_counts[end] <= max_tokens):
        tokens += token_counts[end]
        end += 1
    return end
