"""Every exception that this package raises on purpose.

FactoryError
├── RequestError         a client's request is wrong; also a ValueError, which vLLM answers with HTTP 400
├── EngineResultError    the engine answered, but the answer must not be served; HTTP 500
├── TransportError       a blob between io processor and pooler is malformed
├── PrepError            a checkpoint cannot be prepared; command line exit status 2
├── ServeError           a server cannot be started as asked; command line exit status 2
├── CheckpointError      a prepared directory does not fit the model that should load it
└── UnsupportedError     a setting that this package refuses instead of ignoring it
"""

from __future__ import annotations


class FactoryError(Exception):
    """Base class of all errors of this package."""


class RequestError(FactoryError, ValueError):
    """A request that the client can mend.

    Args:
        field: The request's field, as the client wrote it, e.g. ``"labels[3]"``.
        problem: What is wrong, with the value received, and what is accepted.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class EngineResultError(FactoryError, RuntimeError):
    """The engine's result for a valid request is unusable (not finite, or the pooler failed)."""


class TransportError(FactoryError):
    """Bytes that do not follow the blob format of :mod:`vllm_factory.pooling.transport`."""


class PrepError(FactoryError):
    """The input of ``vllm-factory-prep`` is not what it claims to be, or is not supported."""


class ServeError(FactoryError):
    """``vllm-factory-serve`` cannot start what was asked for."""


class CheckpointError(FactoryError):
    """Tensors or settings of a prepared checkpoint do not match the model."""


class UnsupportedError(FactoryError):
    """A vLLM setting that would give wrong results, refused at start."""


def shown(value: object, limit: int = 80) -> str:
    """``value`` as it may stand in a message: ASCII only (a lone surrogate cannot be sent), and short."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
