"""``FactoryIOProcessor``: runs a :class:`~vllm_factory.io.pipeline.Pipeline` as a vLLM io processor.

A request's state travels with the request. Its blobs carry a ticket that the pooler sends back, so a result
finds its state whatever the client called the request and in whatever order results come. The state itself is
referenced by the object in which vLLM keeps the request's parameters and by nothing else of ours: when a
request is finished, aborted or failed, the state is gone with it, and there is nothing to clean up.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from vllm import PoolingParams
from vllm.config import VllmConfig
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor

from vllm_factory.compat.vllm_api import ParamsPerPrompt, capabilities
from vllm_factory.errors import EngineResultError, RequestError, TransportError
from vllm_factory.io.pipeline import Pipeline, Prompt
from vllm_factory.pooling import transport
from vllm_factory.pooling.protocol import Status

#: Requests whose state is kept although vLLM gives it no home (0.19 only, see ``_keep``).
_KEPT_REQUESTS = 4096


class _InFlight:
    """One request between ``pre_process`` and ``post_process``."""

    def __init__(self, ticket: int, prompts: list[Prompt], state: Any, kind: int) -> None:
        self.ticket = ticket
        self.state = state
        self.blobs = deque(transport.pack(kind, ticket, prompt.arrays) for prompt in prompts)


# vLLM calls pre_process and merge_pooling_params one after the other in one context, and tells the second
# nothing of the first's request.
_pending: ContextVar[_InFlight | None] = ContextVar("vllm_factory_pending", default=None)


class FactoryIOProcessor(IOProcessor):  # type: ignore[misc]
    """Base of every plugin's io processor. Subclasses say how to build their pipeline."""

    def __init__(self, vllm_config: VllmConfig, renderer: Any = None) -> None:
        super().__init__(vllm_config, renderer)
        self.pipeline: Pipeline[Any, Any] = self.build_pipeline(vllm_config)
        self._in_flight: weakref.WeakValueDictionary[int, _InFlight] = weakref.WeakValueDictionary()
        self._tickets = itertools.count(secrets.randbits(48))
        self._kept: deque[_InFlight] = deque(maxlen=1 if capabilities().params_per_prompt else _KEPT_REQUESTS)

    def build_pipeline(self, vllm_config: VllmConfig) -> Pipeline[Any, Any]:
        """The plugin's pipeline for the model that vLLM is about to serve."""
        raise NotImplementedError

    def parse_data(self, data: object) -> Any:
        """Check the request; a ``ValueError`` here is HTTP 400."""
        return self.pipeline.parse(data)

    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        """Prompts of a checked request, as token ids."""
        encoded = self.pipeline.encode(prompt)
        if len(encoded.prompts) > 1 and not capabilities().params_per_prompt:
            raise RequestError(
                "text",
                f"needs {len(encoded.prompts)} prompts (several texts, or windows of a long one); "
                f"vLLM {capabilities().version} takes one prompt a request",
            )
        request = _InFlight(next(self._tickets), encoded.prompts, encoded.state, self.pipeline.blob_kind)
        self._in_flight[request.ticket] = request
        _pending.set(request)
        return [_for_vllm(prompt) for prompt in encoded.prompts]

    def merge_pooling_params(self, params: PoolingParams | None = None) -> Any:
        """Parameters of the request that ``pre_process`` has just seen.

        A server asks once for all prompts (``params`` is None); ``LLM.encode`` asks once for each.
        """
        request = _pending.get()
        if request is None or not request.blobs:
            return params or PoolingParams(task=self.pipeline.task)
        if params is not None or not capabilities().params_per_prompt:
            self._keep(request)
            return self._params(request.blobs.popleft())
        _pending.set(None)
        blobs, request.blobs = request.blobs, deque()
        return ParamsPerPrompt(map(self._params, blobs), request)

    def post_process(
        self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """The response of a finished request."""
        blobs = [self._unpack(output) for output in model_output]
        request = self._in_flight.get(blobs[0].ticket)
        if request is None or any(blob.ticket != request.ticket for blob in blobs):
            raise EngineResultError("the engine returned results of another request")
        for blob in blobs:
            _raise_for(Status(blob.status))
        tokens = sum(len(output.prompt_token_ids) for output in model_output)
        return self.pipeline.decode(request.state, [blob.arrays for blob in blobs], tokens)

    def _params(self, blob: bytes) -> PoolingParams:
        return PoolingParams(task=self.pipeline.task, extra_kwargs={transport.EXTRA_KWARG: blob})

    def _keep(self, request: _InFlight) -> None:
        """Hold on to a state that no object of vLLM's carries: ``LLM.encode``'s latest, or 0.19's requests."""
        if not self._kept or self._kept[-1] is not request:
            self._kept.append(request)

    def _unpack(self, output: PoolingRequestOutput) -> transport.Blob:
        try:
            return transport.unpack(output.outputs.data.cpu().numpy().tobytes(), self.pipeline.blob_kind)
        except TransportError as error:
            raise EngineResultError(f"the engine's result cannot be read: {error}") from error


def _for_vllm(prompt: Prompt) -> dict[str, Any]:
    """A prompt in vLLM's form."""
    if prompt.image is None:
        return {"prompt_token_ids": prompt.token_ids}
    return {
        "prompt_token_ids": prompt.token_ids,
        "multi_modal_data": {"image": prompt.image},
        # Under its hash, vLLM would send an image to the engine once, and refer to it from then on; but requests
        # that are prepared at the same time may reach the engine in another order, and the reference comes first.
        "multi_modal_uuids": {"image": [uuid4().hex]},
    }


def _raise_for(status: Status) -> None:
    if status is Status.OK:
        return
    if status is Status.BAD_BLOB:
        raise RequestError(
            "data",
            "the prompt was changed on its way (truncate_prompt_tokens?); send the request without that",
        )
    if status is Status.TOO_MANY:
        raise RequestError(
            "threshold", "too many spans score above it; raise it, or send fewer labels or shorter texts"
        )
    if status is Status.NOT_FINITE:
        raise EngineResultError("the scores are not finite; serve with --dtype bfloat16 or --dtype float32")
    raise EngineResultError("the pooler failed; the server's log has the reason")
