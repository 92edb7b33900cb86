"""One vector a text, as sentence-transformers has it: prompts, tokens, dimensions. No vLLM import.

Nothing of it is known here; everything stands in the checkpoint's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_factory.errors import CheckpointError, RequestError, shown
from vllm_factory.io.limits import Limits
from vllm_factory.io.ner import validated
from vllm_factory.io.pipeline import Encoded, Prompt
from vllm_factory.io.retrieval import DenseTextRequest, check_text_request, usage
from vllm_factory.io.texts import TextTokenizer, Tokens
from vllm_factory.io.vectors import unpacked, vector_item
from vllm_factory.poolers.embedding import EmbeddingPooler, PoolingConfig, embedding_pooler
from vllm_factory.published import Published


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSettings:
    """What the checkpoint's files say about requests.

    Attributes:
        prompts: Prompts by name; ``query`` and ``document`` are always there.
        default_prompt: The prompt of a request that asks for none; mostly ``""``.
        include_prompt: Whether a prompt's tokens are pooled with the text's.
        dimensions: Of a vector.
        max_tokens: Most tokens of a prompt, where the files say so.
        lower: Texts are lower-cased first.
    """

    prompts: dict[str, str]
    default_prompt: str
    include_prompt: bool
    dimensions: int
    max_tokens: int | None
    lower: bool

    @classmethod
    def read(cls, checkpoint: Published, hidden_size: int) -> DenseSettings:
        """From the checkpoint's files; ``hidden_size`` is its backbone's.

        Raises:
            CheckpointError: A setting has another type or form than sentence-transformers'.
        """
        transformer = checkpoint.transformer_settings()
        max_tokens = transformer.get("max_seq_length")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise CheckpointError(f"{checkpoint.name}: max_seq_length is {shown(max_tokens)}")
        # Only its width is of interest here.
        with torch.device("meta"):
            _, head = embedding_pooler(checkpoint, hidden_size)
        return cls(
            prompts=checkpoint.prompts(),
            default_prompt=checkpoint.default_prompt(),
            include_prompt=PoolingConfig.read(checkpoint).include_prompt,
            dimensions=head.out_features,
            max_tokens=max_tokens,
            lower=bool(transformer.get("do_lower_case", False)),
        )


@dataclass(frozen=True, slots=True)
class DenseState:
    """What decoding needs of a request."""

    request: DenseTextRequest
    tokens: tuple[Tokens, ...]


class DensePipeline:
    """Requests of an embedding model; see :class:`~vllm_factory.io.pipeline.Pipeline`.

    Args:
        settings: The checkpoint's.
        tokenizer: The checkpoint's.
        max_tokens: Most tokens of a prompt that the server takes. Texts are cut there.
        limits: Bounds on requests.
    """

    blob_kind = EmbeddingPooler.blob_kind
    task = EmbeddingPooler.task

    def __init__(self, settings: DenseSettings, tokenizer: TextTokenizer, max_tokens: int, limits: Limits) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.max_tokens = min(max_tokens, settings.max_tokens or max_tokens)
        self.limits = limits

    @classmethod
    def read(
        cls, model: str, revision: str | None, hidden_size: int, max_tokens: int, limits: Limits
    ) -> DensePipeline:
        """The pipeline of a published checkpoint, a directory or a hub id."""
        checkpoint = Published.open(model, revision)
        settings = DenseSettings.read(checkpoint, hidden_size)
        tokenizer = TextTokenizer.load(str(checkpoint.path), lower=settings.lower)
        return cls(settings, tokenizer, max_tokens, limits)

    def parse(self, data: Any) -> DenseTextRequest:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        request = validated(DenseTextRequest, data, "an object with text")
        check_text_request(request, self.settings.prompts, self.limits)
        if request.dimensions is not None and request.dimensions > self.settings.dimensions:
            raise RequestError(
                "dimensions", f"{request.dimensions}; this checkpoint's vectors have {self.settings.dimensions}"
            )
        return request

    def encode(self, request: DenseTextRequest) -> Encoded[DenseState]:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        prompt = self._prompt(request)
        skip = 0 if self.settings.include_prompt or not prompt else self._length(prompt)
        tokens = [self.tokenizer.encode(text, self.max_tokens, prompt) for text in request.texts]
        prompts = []
        for index, written in enumerate(tokens):
            if len(written.ids) <= skip:
                # Only where the tokenizer ends texts with no token of its own, or merges a prompt with its text.
                field = "text" if isinstance(request.text, str) else f"text[{index}]"
                raise RequestError(field, f"{shown(request.texts[index])} has no token to pool")
            about = np.array([request.dimensions or 0, len(written.ids), skip], np.int32)
            prompts.append(Prompt(written.ids, (about,)))
        return Encoded(prompts, DenseState(request, tuple(tokens)))

    def decode(
        self, state: DenseState, results: Sequence[Sequence[np.ndarray]], prompt_tokens: int
    ) -> dict[str, Any]:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        request = state.request
        items = [
            {
                **vector_item(unpacked(list(result)), request.output, request.dtype),
                "tokens": len(tokens.ids),
                "truncated": tokens.truncated,
            }
            for result, tokens in zip(results, state.tokens, strict=True)
        ]
        single = isinstance(request.text, str)
        return {"embeddings": items[0] if single else items, "usage": usage(prompt_tokens)}

    def _prompt(self, request: DenseTextRequest) -> str:
        if request.prompt is not None:
            return request.prompt
        if request.prompt_name is not None:
            return self.settings.prompts[request.prompt_name]
        if request.is_query is None:
            return self.settings.default_prompt
        return self.settings.prompts["query" if request.is_query else "document"]

    def _length(self, prompt: str) -> int:
        """Tokens that a prompt takes at the beginning of a text, as the library counts them."""
        ids = self.tokenizer.encode(prompt, self.max_tokens).ids
        ended = bool(ids) and ids[-1] in self.tokenizer.tokenizer.all_special_ids
        return len(ids) - ended
