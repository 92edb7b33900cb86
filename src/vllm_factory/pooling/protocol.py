"""The contract between a pooler and whatever runs it. Imports nothing of vLLM and nothing of this package
but its errors.

A pooler turns the hidden states of one engine step into one result per request. It sees all requests of the
step at once, so that it can work on them as a batch. Requests are ragged: ``hidden_states`` is flat, and the
tokens of request ``r`` are the rows ``starts[r] : starts[r] + lengths[r]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch


class Status(IntEnum):
    """First value of every result. Everything but OK is turned into an error by the io processor."""

    OK = 0
    #: The blob is malformed or does not fit the prompt. The pooler did not run on it.
    BAD_BLOB = 1
    #: More candidates pass the threshold than one request may have.
    TOO_MANY = 2
    #: Scores are NaN or infinite (overflow in a 16-bit type, or a broken checkpoint).
    NOT_FINITE = 3
    #: The pooler raised. The server's log has the traceback.
    FAILED = 4


@dataclass(frozen=True, slots=True)
class PoolerResult:
    """One request's result, on the host.

    Attributes:
        status: Whether ``arrays`` may be used.
        arrays: Small one-dimensional arrays; their meaning belongs to the pooler and its decoder.
    """

    status: Status
    arrays: tuple[np.ndarray, ...] = ()


RequestT = TypeVar("RequestT")


@runtime_checkable
class FactoryPooler(Protocol[RequestT]):
    """What a head must offer to be served. Implementations are ``torch.nn.Module`` as well.

    ``parse`` runs on the host for each request and is where malformed input ends; ``pool`` is one batched
    computation over all requests of the step.
    """

    #: The native vLLM pooling task under which the pooler runs.
    task: str
    #: Tag of the blobs this pooler understands (see :mod:`vllm_factory.pooling.transport`).
    blob_kind: int

    def parse(self, arrays: Sequence[np.ndarray], num_tokens: int) -> RequestT:
        """Check one request's arrays against its prompt length.

        Raises:
            TransportError: They do not fit, whatever the reason.
        """
        ...

    def pool(
        self, hidden_states: torch.Tensor, starts: Sequence[int], requests: Sequence[RequestT]
    ) -> list[PoolerResult]:
        """Results of ``requests``, in order.

        Args:
            hidden_states: ``[num_tokens, hidden_size]``, model dtype, on the model's device.
            starts: Row of each request's first token.
            requests: What ``parse`` returned; at least one.
        """
        ...
