"""The bridge to vLLM's pooler interface: whatever happens in a step, every request gets an answer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm_factory.compat.vllm_api import load_weights_strictly, refuse_unsupported
from vllm_factory.errors import CheckpointError, TransportError, UnsupportedError
from vllm_factory.pooling import transport
from vllm_factory.pooling.protocol import FactoryPooler, PoolerResult, Status
from vllm_factory.pooling.vllm_adapter import VllmPoolerAdapter

KIND = 3


class Sum(torch.nn.Module):
    """Adds the blob's number to the sum of a request's hidden states. Fails on 13."""

    task = "token_classify"
    blob_kind = KIND

    def parse(self, arrays: Sequence[np.ndarray], num_tokens: int) -> tuple[int, int]:
        if len(arrays) != 1 or arrays[0].size != 1:
            raise TransportError("one number, please")
        return int(arrays[0][0]), num_tokens

    def pool(
        self, hidden_states: torch.Tensor, starts: Sequence[int], requests: Sequence[Any]
    ) -> list[PoolerResult]:
        if any(number == 13 for number, _ in requests):
            raise RuntimeError("out of memory")
        return [
            PoolerResult(Status.OK, (np.array([number + int(hidden_states[s : s + n].sum())], np.int32),))
            for s, (number, n) in zip(starts, requests, strict=True)
        ]


def step(blobs: list[Any], lengths: list[int], prompt_lengths: list[int] | None = None) -> list[Any]:
    """One engine step: hidden states of ones, one row a token."""
    params = [
        SimpleNamespace(extra_kwargs=None if blob is None else {transport.EXTRA_KWARG: blob}) for blob in blobs
    ]
    metadata = SimpleNamespace(
        prompt_lens=torch.tensor(prompt_lengths or lengths),
        pooling_params=params,
        pooling_cursor=SimpleNamespace(num_scheduled_tokens_cpu=torch.tensor(lengths)),
    )
    outputs = VllmPoolerAdapter(Sum())(torch.ones(sum(lengths), 1), metadata)
    return [
        None
        if output is None
        else transport.unpack(output.numpy().tobytes(), KIND)
        if output.dtype == torch.uint8
        else output.tolist()
        for output in outputs
    ]


def blob(number: int, ticket: int = 0) -> bytes:
    return transport.pack(KIND, ticket, [np.array([number], np.int32)])


def test_the_pooler_satisfies_the_protocol() -> None:
    assert isinstance(Sum(), FactoryPooler)


def test_every_request_gets_its_own_rows_and_ticket() -> None:
    first, second = step([blob(10, ticket=7), blob(20, ticket=2**63)], [3, 5])
    assert (first.ticket, first.status, first.arrays[0].tolist()) == (7, Status.OK, [13])
    assert (second.ticket, second.status, second.arrays[0].tolist()) == (2**63, Status.OK, [25])


def test_requests_without_blob_and_bad_blobs_leave_the_others_alone() -> None:
    plain, bad, wrong_kind, good = step([None, b"nonsense", transport.pack(9, 0, []), blob(1)], [2, 2, 2, 2])
    assert plain == [0.0]
    assert bad.status == wrong_kind.status == Status.BAD_BLOB
    assert good.arrays[0].tolist() == [3]


def test_an_exception_in_the_pooler_is_an_answer_not_the_end() -> None:
    failed, plain = step([blob(13, ticket=5), None], [1, 1])
    assert (failed.ticket, failed.status) == (5, Status.FAILED)
    assert plain == [0.0]


def test_an_unfinished_prompt_has_no_result_yet() -> None:
    unfinished, finished = step([blob(1), blob(1)], [2, 2], prompt_lengths=[4, 2])
    assert unfinished is None
    assert finished.arrays[0].tolist() == [3]


def vllm_config(**changes: Any) -> Any:
    """The parts of a VllmConfig that the check reads."""
    values = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "quantization": None,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "lora_config": None,
        **changes,
    }
    everything = SimpleNamespace(**values)
    return SimpleNamespace(
        parallel_config=everything,
        model_config=everything,
        scheduler_config=everything,
        cache_config=everything,
        lora_config=values["lora_config"],
    )


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"quantization": "fp8"}, "--quantization fp8"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"enable_chunked_prefill": True}, "--enable-chunked-prefill"),
        ({"enable_prefix_caching": True}, "--enable-prefix-caching"),
    ],
)
def test_settings_that_would_be_wrong_are_refused_at_start(change: dict[str, Any], flag: str) -> None:
    refuse_unsupported(vllm_config())
    with pytest.raises(UnsupportedError, match=flag):
        refuse_unsupported(vllm_config(**change))


def test_weights_load_strictly() -> None:
    network = torch.nn.Linear(2, 3)
    good = {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}
    assert load_weights_strictly(network.named_parameters(), good.items()) == {"weight", "bias"}
    with pytest.raises(CheckpointError, match=r"nobody takes: extra; .* nobody fills: bias"):
        load_weights_strictly(
            network.named_parameters(), {"weight": good["weight"], "extra": torch.ones(1)}.items()
        )
    with pytest.raises(CheckpointError, match=r"weight: shape \(2, 3\), the model has \(3, 2\)"):
        load_weights_strictly(network.named_parameters(), {**good, "weight": torch.ones(2, 3)}.items())
