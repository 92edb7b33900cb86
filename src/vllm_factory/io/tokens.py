"""Token ids of words.

A fast tokenizer encodes every word of a pre-split text by itself, so a word's ids do not depend on its
neighbours and may be remembered. Most words of most requests have been seen before; looking them up instead of
calling the tokenizer is what keeps the API process ahead of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from vllm_factory.errors import CheckpointError, shown

#: Words remembered, and how long a word may be to be remembered: together they bound the memory.
CACHE_WORDS = 200_000
CACHE_WORD_CHARS = 64


def tokenizer_file(model: str, revision: str | None = None) -> Path:
    """``tokenizer.json`` of a prepared checkpoint: a directory, or a hub id under which one was published."""
    if Path(model).is_dir():
        return Path(model) / "tokenizer.json"
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "tokenizer.json", revision=revision))


class WordTokenizer:
    """Encodes words through a ``tokenizer.json``.

    Args:
        path: The file.
        known: A word that certainly has tokens.

    Attributes:
        prefix, suffix: Ids of the special tokens around every sequence.

    Raises:
        CheckpointError: The file cannot be read.
    """

    def __init__(self, path: Path, known: str = "a") -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises plain Exception
            raise CheckpointError(f"{path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cache: dict[str, tuple[int, ...]] = {}
        self.prefix, self.suffix = self._special_tokens(known)

    def encode(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The ids of each word; a word may have none (a zero-width character, say)."""
        cache = self._cache
        missing = [word for word in dict.fromkeys(words) if word not in cache]
        if not missing:
            return [cache[word] for word in words]
        encodings = self._tokenizer.encode_batch(
            [[word] for word in missing], is_pretokenized=True, add_special_tokens=False
        )
        found = {word: tuple(encoding.ids) for word, encoding in zip(missing, encodings, strict=True)}
        # Another thread may empty the cache between two look-ups, so this call looks into its own copy as well.
        result = [found.get(word) or cache.get(word) or () for word in words]
        if len(cache) + len(found) > CACHE_WORDS:
            self._cache = cache = {}
        cache.update({word: ids for word, ids in found.items() if len(word) <= CACHE_WORD_CHARS})
        return result

    def id_of(self, token: str) -> int | None:
        """Id of a token of the vocabulary."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def _special_tokens(self, known: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        encoding = self._tokenizer.encode([known], is_pretokenized=True, add_special_tokens=True)
        inside = [i for i, word in enumerate(encoding.word_ids) if word is not None]
        if not inside:
            raise CheckpointError(f"the tokenizer gives no token for {shown(known)}")
        return tuple(encoding.ids[: inside[0]]), tuple(encoding.ids[inside[-1] + 1 :])
