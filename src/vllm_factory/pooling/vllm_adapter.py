"""The one bridge between vLLM's pooler interface and :class:`~vllm_factory.pooling.protocol.FactoryPooler`.

Nothing that a request contains may raise here: an exception in the engine process ends the server for all.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Any

import torch
from vllm.model_executor.layers.pooler import Pooler
from vllm.v1.pool.metadata import PoolingMetadata

from vllm_factory.errors import TransportError
from vllm_factory.pooling import transport
from vllm_factory.pooling.protocol import FactoryPooler, PoolerResult, Status

logger = logging.getLogger(__name__)


class VllmPoolerAdapter(Pooler):  # type: ignore[misc]
    """Runs a :class:`FactoryPooler` inside vLLM.

    A request without a blob (vLLM's own requests, warm-up) gets one zero. A request whose blob does not fit
    gets a result that says so. Everything else goes to the pooler in one call.
    """

    def __init__(self, pooler: FactoryPooler[Any]) -> None:
        super().__init__()
        self.pooler = pooler

    def get_supported_tasks(self) -> Set[str]:
        """The pooler's one native task."""
        return {self.pooler.task}

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> list[torch.Tensor | None]:
        """One tensor a request: a packed blob as uint8, a zero, or ``None`` while its prompt is unfinished."""
        lengths = pooling_metadata.pooling_cursor.num_scheduled_tokens_cpu.tolist()
        outputs: list[torch.Tensor | None] = [torch.zeros(1) for _ in lengths]
        tickets: dict[int, int] = {}
        accepted: dict[int, Any] = {}
        starts = []
        start = 0
        for index, length in enumerate(lengths):
            starts.append(start)
            start += length
            if length != int(pooling_metadata.prompt_lens[index]):
                outputs[index] = None
                continue
            blob = (pooling_metadata.pooling_params[index].extra_kwargs or {}).get(transport.EXTRA_KWARG)
            if blob is None:
                continue
            tickets[index], request = self._parse(blob, length)
            if request is None:
                outputs[index] = self._output(tickets[index], PoolerResult(Status.BAD_BLOB))
            else:
                accepted[index] = request
        results = self._pool(hidden_states, [starts[i] for i in accepted], list(accepted.values()))
        for index, result in zip(accepted, results, strict=True):
            outputs[index] = self._output(tickets[index], result)
        return outputs

    def _parse(self, blob: Any, length: int) -> tuple[int, Any | None]:
        ticket = 0
        try:
            unpacked = transport.unpack(blob, self.pooler.blob_kind)
            ticket = unpacked.ticket
            return ticket, self.pooler.parse(unpacked.arrays, length)
        except TransportError as error:
            logger.warning("a request's blob was refused: %s", error)
            return ticket, None

    def _pool(self, hidden_states: torch.Tensor, starts: list[int], requests: list[Any]) -> list[PoolerResult]:
        if not requests:
            return []
        try:
            return self.pooler.pool(hidden_states, starts, requests)
        except Exception:
            # A fault of ours, or memory: it must cost these requests an error, not everybody the server.
            logger.exception("the pooler failed on a step of %d requests", len(requests))
            return [PoolerResult(Status.FAILED)] * len(requests)

    def _output(self, ticket: int, result: PoolerResult) -> torch.Tensor:
        blob = transport.pack(self.pooler.blob_kind, ticket, result.arrays, int(result.status))
        return torch.frombuffer(bytearray(blob), dtype=torch.uint8)
