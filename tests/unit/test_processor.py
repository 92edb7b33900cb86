"""FactoryIOProcessor: state travels with the request, survives concurrency, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm import PoolingParams

from vllm_factory.errors import EngineResultError, RequestError
from vllm_factory.io.pipeline import Encoded, Prompt
from vllm_factory.io.processor import FactoryIOProcessor
from vllm_factory.pooling import transport
from vllm_factory.pooling.protocol import Status

ECHO = 7


class Echo:
    """Sends numbers to the engine and gives back what came, beside what it had remembered."""

    task = "token_classify"
    blob_kind = ECHO

    def parse(self, data: Any) -> list[int]:
        if not isinstance(data, list):
            raise RequestError("data", "expected a list")
        return data

    def encode(self, request: list[int]) -> Encoded[list[int]]:
        prompts = [Prompt([number], (np.array([number], np.int32),)) for number in request]
        return Encoded(prompts, list(request))

    def decode(self, state: list[int], results: Any, prompt_tokens: int) -> Any:
        return state, [int(arrays[0][0]) for arrays in results], prompt_tokens


class EchoProcessor(FactoryIOProcessor):
    def build_pipeline(self, vllm_config: Any) -> Any:
        return Echo()


@pytest.fixture
def processor() -> EchoProcessor:
    return EchoProcessor(SimpleNamespace())


def engine_output(params: PoolingParams, status: Status = Status.OK) -> Any:
    """What the engine returns for a prompt: its blob's array, sent back."""
    assert params.extra_kwargs is not None
    blob = transport.unpack(params.extra_kwargs[transport.EXTRA_KWARG], ECHO)
    packed = transport.pack(ECHO, blob.ticket, blob.arrays, status)
    data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return SimpleNamespace(outputs=SimpleNamespace(data=data), prompt_token_ids=[0])


def start(processor: EchoProcessor, numbers: list[int]) -> Any:
    prompts = processor.pre_process(processor.parse_data(numbers), request_id="the-same")
    assert [prompt["prompt_token_ids"] for prompt in prompts] == [[number] for number in numbers]
    return processor.merge_pooling_params()


def test_a_request_comes_back_with_its_state(processor: EchoProcessor) -> None:
    params = start(processor, [3, 4])
    assert [p.task for p in params] == ["token_classify"] * 2
    outputs = [engine_output(p) for p in params]
    assert processor.post_process(outputs, request_id="the-same") == ([3, 4], [3, 4], 2)


def test_nothing_is_left_of_finished_aborted_and_failed_requests(processor: EchoProcessor) -> None:
    finished, aborted, failed = (start(processor, [n]) for n in (1, 2, 3))
    assert len(processor._in_flight) == 3
    processor.post_process([engine_output(p) for p in finished])
    with pytest.raises(EngineResultError):
        processor.post_process([engine_output(p, Status.FAILED) for p in failed])
    # What vLLM does when it is done with a request, one way or another: it drops the parameters.
    del finished, aborted, failed
    gc.collect()
    assert not processor._in_flight
    assert not processor._kept


def test_a_request_that_fails_before_the_engine_leaves_nothing(processor: EchoProcessor) -> None:
    with pytest.raises(RequestError):
        processor.parse_data("no list")

    async def request() -> None:
        processor.pre_process([1])  # and then vLLM fails before it asks for the parameters

    asyncio.run(request())
    gc.collect()
    assert not processor._in_flight


def test_interleaved_requests_keep_their_own_state(processor: EchoProcessor) -> None:
    async def one(number: int) -> Any:
        processor.pre_process([number, number + 100])
        await asyncio.sleep(0)
        params = processor.merge_pooling_params()
        await asyncio.sleep(0.001 * (50 - number))
        return processor.post_process([engine_output(p) for p in params])

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(one(n) for n in range(50)))

    for number, (state, echoed, _) in enumerate(asyncio.run(all_of_them())):
        assert state == echoed == [number, number + 100]


def test_offline_asks_for_each_prompt_s_parameters(processor: EchoProcessor) -> None:
    prompts = processor.pre_process([5, 6, 7])
    outputs = [engine_output(processor.merge_pooling_params(PoolingParams())) for _ in prompts]
    assert processor.post_process(outputs) == ([5, 6, 7], [5, 6, 7], 3)


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (Status.BAD_BLOB, RequestError, "truncate_prompt_tokens"),
        (Status.TOO_MANY, RequestError, "threshold"),
        (Status.NOT_FINITE, EngineResultError, "not finite"),
        (Status.FAILED, EngineResultError, "the pooler failed"),
    ],
)
def test_bad_results_are_never_served(
    status: Status, error: type[Exception], message: str, processor: EchoProcessor
) -> None:
    params = start(processor, [1])
    with pytest.raises(error, match=message):
        processor.post_process([engine_output(params[0], status)])


def test_results_of_another_request_are_refused(processor: EchoProcessor) -> None:
    first, second = start(processor, [1]), start(processor, [2])
    with pytest.raises(EngineResultError, match="another request"):
        processor.post_process([engine_output(first[0]), engine_output(second[0])])


def test_no_image_stands_for_another(processor: EchoProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that came twice would let vLLM send the second image as a reference, which may arrive first."""
    picture = Image.new("RGB", (2, 2))
    prompts = [Prompt([1], (np.array([1], np.int32),), picture)] * 2
    monkeypatch.setattr(processor.pipeline, "encode", lambda request: Encoded(prompts, request))
    sent = [*processor.pre_process([1]), *processor.pre_process([1])]
    assert all(prompt["multi_modal_data"] == {"image": picture} for prompt in sent)
    names = [prompt["multi_modal_uuids"]["image"] for prompt in sent]
    assert all(len(each) == 1 for each in names)
    assert len({each[0] for each in names}) == len(sent)
