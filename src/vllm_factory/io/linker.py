"""The linker's pipeline: texts to prompts, labels beside them for the label encoder. No vLLM import.

A bi-encoder reads a text without its labels, so any number of them fits. They are encoded in the engine; what
travels there with each prompt is their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from vllm_factory.errors import RequestError, shown
from vllm_factory.io.gliner import LabelPrompt
from vllm_factory.io.limits import Limits
from vllm_factory.io.link_pipeline import LinkPipeline, Pass
from vllm_factory.io.linking import LinkRequest
from vllm_factory.io.pipeline import Prompt
from vllm_factory.io.tokens import LabelTokenizer, WordTokenizer
from vllm_factory.poolers.gliner_bi import BiEncoderPooler
from vllm_factory.poolers.gliner_config import GlinerConfig

#: Sets of labels whose tokens are remembered: a knowledge base comes with request after request.
PACKED_SETS = 16
#: Tokens of labels that all prompts of a request may carry together: 64 MiB.
MAX_CARRIED_TOKENS = 2**24


class LinkerPipeline(LinkPipeline):
    """See :class:`~vllm_factory.io.pipeline.Pipeline`.

    Args:
        config: The head's configuration.
        tokenizer: The text encoder's tokenizer.
        labels_tokenizer: The label encoder's.
        max_tokens: Tokens of one prompt (vLLM's ``max_model_len``).
        max_label_tokens: Tokens of one label.
        tokenizer_max_length: Tokens at which the library's own tokenizer call cuts a text.
        limits: Bounds on one request.
    """

    blob_kind = BiEncoderPooler.blob_kind

    def __init__(
        self,
        config: GlinerConfig,
        tokenizer: WordTokenizer,
        labels_tokenizer: LabelTokenizer,
        max_tokens: int,
        max_label_tokens: int,
        tokenizer_max_length: int,
        limits: Limits,
    ) -> None:
        super().__init__(config, tokenizer, max_tokens, tokenizer_max_length, limits)
        self.labels_tokenizer = labels_tokenizer
        self.max_label_tokens = max_label_tokens
        self._packed = lru_cache(maxsize=PACKED_SETS)(self._pack)

    def _read_markers(self) -> None:
        """There are none: a prompt is the text alone."""

    def passes(self, request: LinkRequest, candidates: Sequence[str]) -> list[Pass]:
        """See :class:`~vllm_factory.io.link_pipeline.LinkPipeline`."""
        types = request.label_prompts
        if types and candidates and self.config.represent_spans:
            # There, every label is scored on the spans that any label begins and ends: types and candidates
            # would find spans for each other, as they do not in two calls of the library.
            return [
                Pass(self._packed(tuple(types), ()), len(types)),
                Pass(self._packed((), tuple(candidates)), 0),
            ]
        return [Pass(self._packed(tuple(types), tuple(candidates)), len(types))]

    def check_prompts(self, passes: Sequence[Pass], prompts: Sequence[Prompt]) -> None:
        """See :class:`~vllm_factory.io.link_pipeline.LinkPipeline`."""
        tokens = max(each.labels.arrays[1].size for each in passes)
        if tokens * len(prompts) > MAX_CARRIED_TOKENS:
            raise RequestError(
                "text",
                f"{len(prompts)} prompts (texts, or windows of long ones), each with labels of {tokens} tokens; "
                f"a request may carry {MAX_CARRIED_TOKENS}. Send fewer texts or fewer labels at once",
            )

    def _pack(self, types: tuple[str, ...], candidates: tuple[str, ...]) -> LabelPrompt:
        ids = self.labels_tokenizer.encode([*types, *candidates])
        for index, (label, tokens) in enumerate(zip((*types, *candidates), ids, strict=True)):
            if not 0 < len(tokens) <= self.max_label_tokens:
                place = index - len(types)
                raise RequestError(
                    f"labels[{index}]" if place < 0 else f"candidate_labels[{place}]",
                    f"{shown(label)} is {len(tokens)} tokens; a label may be 1 to {self.max_label_tokens}",
                )
        bounds = np.array([0, *accumulate(map(len, ids))], np.int32)
        flat = np.array([token for label in ids for token in label], np.int32)
        return LabelPrompt([], (bounds, flat), 0, len(ids))
