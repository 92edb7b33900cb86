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

#: Texts remembered, and how long one may be to be remembered: together they bound the memory.
CACHE_WORDS = 200_000
CACHE_WORD_CHARS = 64


#: Where a prepared bi-encoder keeps the tokenizer of its label encoder.
LABELS_TOKENIZER = "labels_tokenizer"


def tokenizer_file(model: str, revision: str | None = None, folder: str = "") -> Path:
    """``tokenizer.json`` of a prepared checkpoint: a directory, or a hub id under which one was published."""
    name = f"{folder}/tokenizer.json" if folder else "tokenizer.json"
    if Path(model).is_dir():
        return Path(model) / name
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, name, revision=revision))


class CachedTokenizer:
    """Encodes texts one by one through a ``tokenizer.json`` and remembers the short ones.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises plain Exception
            raise CheckpointError(f"{path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The ids of each text; there may be none (of a zero-width character, say)."""
        cache = self._cache
        missing = [text for text in dict.fromkeys(texts) if text not in cache]
        if not missing:
            return [cache[text] for text in texts]
        found = dict(zip(missing, self._encode(missing), strict=True))
        # Another thread may empty the cache between two look-ups, so this call looks into its own copy as well.
        result = [found.get(text) or cache.get(text) or () for text in texts]
        if len(cache) + len(found) > CACHE_WORDS:
            self._cache = cache = {}
        cache.update({text: ids for text, ids in found.items() if len(text) <= CACHE_WORD_CHARS})
        return result

    def id_of(self, token: str) -> int | None:
        """Id of a token of the vocabulary."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def _encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        raise NotImplementedError


class LabelTokenizer(CachedTokenizer):
    """Encodes whole labels, special tokens included, for an encoder of labels.

    Args:
        path: The file.
        max_length: Tokens at which the library's own tokenizer call cuts a label.

    Raises:
        CheckpointError: The file cannot be read.
    """

    def __init__(self, path: Path, max_length: int) -> None:
        super().__init__(path)
        self._tokenizer.enable_truncation(max_length)

    def _encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        return [tuple(encoding.ids) for encoding in self._tokenizer.encode_batch(texts)]


class WordTokenizer(CachedTokenizer):
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
        super().__init__(path)
        self.prefix, self.suffix = self._special_tokens(known)

    def _encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        encodings = self._tokenizer.encode_batch(
            [[word] for word in texts], is_pretokenized=True, add_special_tokens=False
        )
        return [tuple(encoding.ids) for encoding in encodings]

    def _special_tokens(self, known: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        encoding = self._tokenizer.encode([known], is_pretokenized=True, add_special_tokens=True)
        inside = [i for i, word in enumerate(encoding.word_ids) if word is not None]
        if not inside:
            raise CheckpointError(f"the tokenizer gives no token for {shown(known)}")
        return tuple(encoding.ids[: inside[0]]), tuple(encoding.ids[inside[-1] + 1 :])
