"""Texts as sentence-transformers tokenizes them, with the place of each token in the text that was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_factory.errors import CheckpointError
from vllm_factory.published import Published


@dataclass(frozen=True, slots=True)
class Tokens:
    """One tokenized text.

    Attributes:
        ids: Token ids, special tokens included.
        spans: For each, where it is in the client's text (start, end), or ``None`` for what the client did not
        send. truncated: Whether the text had more tokens.
    """

    ids: list[int]
    spans: list[tuple[int, int] | None]
    truncated: bool

    def with_token(self, index: int, token: int) -> Tokens:
        """Another special token, at ``index`` or at the end."""
        ids, spans = list(self.ids), list(self.spans)
        ids.insert(index, token)
        spans.insert(index, None)
        return Tokens(ids, spans, self.truncated)

    def first(self, number: int) -> Tokens:
        """The first tokens, special ones like any other."""
        number = max(0, number)
        return Tokens(self.ids[:number], self.spans[:number], self.truncated or len(self.ids) > number)

    def padded(self, length: int, token: int) -> Tokens:
        """``token`` behind the last one, up to ``length``."""
        missing = max(0, length - len(self.ids))
        return Tokens([*self.ids, *[token] * missing], [*self.spans, *[None] * missing], self.truncated)


class TextTokenizer:
    """A checkpoint's own tokenizer, used the way sentence-transformers does: strip, maybe lower-case, truncate.

    Args:
        tokenizer: A fast tokenizer of transformers.
        lower: ``do_lower_case`` of ``sentence_bert_config.json``.
        backend: What tokenizes, where it is not the one inside ``tokenizer``.

    Raises:
        CheckpointError: It is no fast tokenizer, or truncates on the left.
    """

    def __init__(self, tokenizer: Any, *, lower: bool = False, backend: Any = None) -> None:
        backend = backend or getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError("the checkpoint's tokenizer has no tokenizer.json")
        if getattr(tokenizer, "truncation_side", "right") != "right":
            raise CheckpointError("the checkpoint's tokenizer truncates on the left, which is not supported")
        self._backend = type(backend).from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self.tokenizer = tokenizer
        self.lower = lower
        self._special = self._around()

    @classmethod
    def load(cls, model: str, revision: str | None = None, *, lower: bool = False) -> TextTokenizer:
        """The tokenizer of a directory or a hub id."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model, revision=revision), lower=lower)

    @classmethod
    def as_saved(cls, checkpoint: Published) -> TextTokenizer:
        """The tokenizer of a checkpoint, exactly as its ``tokenizer.json`` has it.

        From version 5, transformers builds some tokenizers (Qwen's) anew from the vocabulary alone and leaves out
        how the file cuts texts; version 4, which the references of such models run on, reads the file.
        """
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer

        saved = checkpoint.path / "tokenizer.json"
        backend = Tokenizer.from_file(str(saved)) if saved.is_file() else None
        return cls(AutoTokenizer.from_pretrained(str(checkpoint.path)), backend=backend)

    def encode(self, text: str, max_length: int, prompt: str = "") -> Tokens:
        """``prompt + text`` as at most ``max_length`` tokens, special tokens included."""
        sent = prompt + text
        stripped = sent.strip()
        offset = len(prompt) - (len(sent) - len(sent.lstrip()) if stripped else 0)
        read, origin = _lowered(stripped) if self.lower else (stripped, None)
        encoding = self._backend.encode(read)
        spans = [
            None if special else _span(start, end, origin, offset)
            for (start, end), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
        ]
        return self._truncated(encoding.ids, spans, max_length)

    def encode_within(self, before: str, text: str, behind: str, *, special: bool = True) -> Tokens:
        """``before + text + behind`` as one text: nothing stripped, lower-cased or cut.

        ``special`` adds the special tokens that the tokenizer puts around every text.
        """
        encoding = self._backend.encode(before + text + behind, add_special_tokens=special)
        spans: list[tuple[int, int] | None] = []
        for (start, end), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            start, end = max(0, start - len(before)), min(len(text), end - len(before))
            spans.append((start, end) if end > start and not special else None)
        return Tokens(encoding.ids, spans, truncated=False)

    def ending(self) -> list[int]:
        """Ids of the special tokens behind every text."""
        behind = self._special[1]
        return list(self._backend.encode("a").ids[-behind:]) if behind else []

    def count(self, text: str) -> int:
        """Tokens of a text, special tokens included."""
        return len(self._backend.encode(text.strip()).ids)

    def id_of(self, token: str) -> int | None:
        """Id of a token, as ``convert_tokens_to_ids`` gives it: of an unknown one the unknown token's, if any."""
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        return None if token_id is None else int(token_id)

    def token(self, token_id: int) -> str:
        """A token's own text."""
        return str(self._backend.id_to_token(token_id))

    def __contains__(self, token: str) -> bool:
        return self._backend.token_to_id(token) is not None

    def _truncated(self, ids: list[int], spans: list[tuple[int, int] | None], max_length: int) -> Tokens:
        if len(ids) <= max_length:
            return Tokens(ids, spans, truncated=False)
        before, behind = self._special
        # Content goes, special tokens stay.
        last = len(ids) - behind
        keep = max(before, max_length - behind)
        return Tokens([*ids[:keep], *ids[last:]], [*spans[:keep], *spans[last:]], truncated=True)

    def _around(self) -> tuple[int, int]:
        """Numbers of special tokens before and behind every text."""
        inside = self._backend.encode("a", add_special_tokens=False).ids
        mask: Sequence[int] = self._backend.encode("a").special_tokens_mask
        if not inside or len(mask) < len(inside):
            raise CheckpointError("the checkpoint's tokenizer gives no token for 'a'")
        before = next(index for index, special in enumerate(mask) if not special)
        return before, len(mask) - before - len(inside)


def _lowered(text: str) -> tuple[str, list[int]]:
    """``text.lower()``, and for each of its characters the character it comes from."""
    # A character may become several; which of a sigma's forms it becomes changes no length.
    origin = [index for index, character in enumerate(text) for _ in character.lower()]
    return text.lower(), [*origin, len(text)]


def _span(start: int, end: int, origin: list[int] | None, offset: int) -> tuple[int, int] | None:
    """From a range of what the tokenizer read to the client's text; ``offset`` characters stand before it."""
    if origin is not None:
        start, end = origin[start], (origin[end - 1] + 1 if end > start else origin[start])
    start, end = max(0, start - offset), end - offset
    return (start, end) if end > start else None
