"""The contract between an io processor and what it processes. Imports nothing of vLLM.

``parse → encode → [engine] → decode``. A pipeline is shared by all requests and keeps nothing of them: what
``decode`` needs is in the state that ``encode`` returns, and the state lives as long as its request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

RequestT = TypeVar("RequestT")
StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt for the engine.

    Attributes:
        token_ids: Its tokens; of an image, the one token that vLLM expands.
        arrays: What its pooler gets with it.
        image: A picture (``PIL.Image.Image``) that belongs to it, or ``None``.
    """

    token_ids: list[int]
    arrays: tuple[np.ndarray, ...]
    image: Any = None


@dataclass(frozen=True, slots=True)
class Encoded(Generic[StateT]):
    """A request on its way to the engine: at least one prompt, and what decoding will need."""

    prompts: list[Prompt]
    state: StateT


class Pipeline(Protocol[RequestT, StateT]):
    """Everything of a plugin's io processor that is not vLLM."""

    #: Tag of the blobs; the same as the pooler's.
    blob_kind: int
    #: Native pooling task of the pooler.
    task: str

    def parse(self, data: Any) -> RequestT:
        """Check a request's ``data``.

        Raises:
            RequestError: It is wrong; the message names the field.
        """
        ...

    def encode(self, request: RequestT) -> Encoded[StateT]:
        """Prompts and state of a checked request.

        Raises:
            RequestError: It does not fit this model (too many tokens, say).
        """
        ...

    def decode(self, state: StateT, results: Sequence[Sequence[np.ndarray]], prompt_tokens: int) -> Any:
        """The response's ``data``, from the pooler's arrays of each prompt, in order."""
        ...
