"""The plugin inside vLLM, in this process: results, batch invariance, and what a server must refuse at start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import LABELS, TEXTS
from conftest import Library, each
from harness import BATCH_TOLERANCE, answer_together, assert_same_entities, prepared_pipeline
from linking import CANDIDATES, TEMPLATE, by_template, layer, records, written

pytestmark = pytest.mark.engine
vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm import LLM, PoolingParams  # noqa: E402

from vllm_factory.io.link_pipeline import LinkPipeline  # noqa: E402
from vllm_factory.io.pipeline import Prompt  # noqa: E402
from vllm_factory.pooling import transport  # noqa: E402
from vllm_factory.pooling.protocol import Status  # noqa: E402


@contextmanager
def engine(path: Any, **options: Any) -> Iterator[LLM]:
    """An engine in this process, gone after the block."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(str(path), dtype="float32", enforce_eager=True, max_num_seqs=8, **options)
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def ask(llm: LLM, **data: Any) -> Any:
    output = llm.encode({"data": data}, pooling_task="plugin", use_tqdm=False)
    return output[0].outputs


NAMES = [
    *("span-v3", "token-v2", "span-v2-conv", "mt5-span", "mt5-token", "mmbert-span", "mmbert-token"),
    *("mmbert-small-heads", "linker-span", "linker-token"),
]


@pytest.mark.parametrize("name", each(NAMES))
def test_equals_the_library_through_the_engine(name: str, library: Library) -> None:
    reference = library.reference(name)
    with engine(library.prepared(name)) as llm:
        want = [reference.predict_entities(text, LABELS, threshold=0.3) for text in TEXTS]
        alone = [ask(llm, text=text, labels=LABELS, threshold=0.3) for text in TEXTS]
        # One request, many prompts: the engine batches them as it likes.
        together = ask(llm, text=TEXTS * 2, labels=LABELS, threshold=0.3)
        for got in (alone, together[: len(TEXTS)], together[len(TEXTS) :]):
            for one, expected in zip(got, want, strict=True):
                assert_same_entities(one, expected)
        _neighbours_change_nothing(llm, library.prepared(name))
        _nothing_hurts_the_engine(llm, prepared_pipeline(library.prepared(name)).blob_kind)
        if name in LINKING:
            _links_as_glinker_does(llm, library.saved(name), LINKING[name])
        assert_same_entities(ask(llm, text=TEXTS[0], labels=LABELS, threshold=0.3), want[0])


def _neighbours_change_nothing(llm: LLM, path: Path) -> None:
    """Requests of other lengths, labels and modes, some with windows, given to the engine at once."""
    modes: list[dict[str, Any]] = [{}, {"flat_ner": False, "threshold": 0.2}, {"multi_label": True}]
    texts = [*TEXTS, " ".join(TEXTS), TEXTS[:3], "", " ".join(TEXTS[3:9])]
    requests = [
        {"text": text, "labels": LABELS[: 1 + i % len(LABELS)], **modes[i % len(modes)]}
        for i, text in enumerate(texts)
    ]

    pipeline = prepared_pipeline(path)

    def run(prompts: list[Prompt]) -> list[tuple[np.ndarray, ...]]:
        kind, task = pipeline.blob_kind, pipeline.task
        blobs = [transport.pack(kind, index, prompt.arrays) for index, prompt in enumerate(prompts)]
        params = [PoolingParams(task=task, extra_kwargs={transport.EXTRA_KWARG: blob}) for blob in blobs]
        tokens = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
        outputs = llm.encode(tokens, params, pooling_task=task, use_tqdm=False)
        return [transport.unpack(output.outputs.data.numpy().tobytes()).arrays for output in outputs]

    if isinstance(pipeline, LinkPipeline):
        requests += [
            {"text": TEXTS[0], "candidate_labels": CANDIDATES[:-1], "threshold": 0.2},
            {"text": TEXTS[0], "labels": LABELS, "candidate_labels": CANDIDATES[:5], "threshold": 0.2},
            {"text": TEXTS[1], "candidate_labels": LABELS, "mentions": [{"start": 4, "end": 20}], "threshold": 0},
        ]
    together = answer_together(pipeline, requests, run)
    for data, got in zip(requests, together, strict=True):
        want = ask(llm, **data)
        pairs = [(got, want)] if isinstance(data["text"], str) else list(zip(got, want, strict=True))
        for one_got, one_want in pairs:
            assert_same_entities(one_got, one_want, tolerance=BATCH_TOLERANCE)


#: Checkpoints that link, and the layer of glinker's that they are.
LINKING = {"linker-span": 3, "linker-token": 3, "mmbert-token": 4}


def _links_as_glinker_does(llm: LLM, saved: Path, number: int) -> None:
    candidates = CANDIDATES[:-1]  # The last one holds a marker of the reranker.
    options = {"threshold": 0.2} | ({"max_labels": 4} if number == 4 else {})
    reference = layer(saved, number, **options)
    want = reference(texts=TEXTS[:4], candidates=[records(candidates)] * 4).entities
    assert sum(map(len, want)) > 3
    got = ask(llm, text=TEXTS[:4], candidate_labels=candidates, template=TEMPLATE, **options)
    for one, expected in zip(got, want, strict=True):
        assert_same_entities(by_template(one), written(expected))


def _nothing_hurts_the_engine(llm: LLM, kind: int) -> None:
    """vLLM's own requests and hostile blobs get an answer each, and so does everyone after them."""
    plain = llm.encode(["hello world", "x"], pooling_task="token_classify", use_tqdm=False)
    assert [output.outputs.data.tolist() for output in plain] == [[0.0], [0.0]]
    arrays = [np.ones(1, np.float32), np.array([10**6], np.int32), np.zeros(1, np.int32)]
    hostile = [
        b"",
        b"VF" + b"\xff" * 30,
        transport.pack(kind, 0, []),
        transport.pack(kind, 0, arrays),
        transport.pack(kind, 0, [np.array([np.nan], np.float32), *arrays[2:], arrays[2]]),
        transport.pack(9, 0, arrays),
        "a string",
        None,
        3,
    ]
    for blob in hostile:
        params = PoolingParams(task="token_classify", extra_kwargs={transport.EXTRA_KWARG: blob})
        (output,) = llm.encode("hello", params, pooling_task="token_classify", use_tqdm=False)
        data = output.outputs.data
        if blob is None:
            assert data.tolist() == [0.0]
        else:
            assert transport.unpack(data.numpy().tobytes()).status == Status.BAD_BLOB


@pytest.mark.deberta_gliner
def test_no_kv_cache_is_allocated_and_prompts_are_never_split(library: Library) -> None:
    with engine(library.prepared("span-v3")) as llm:
        config = llm.llm_engine.vllm_config
        assert not config.cache_config.enable_prefix_caching
        assert not config.scheduler_config.enable_chunked_prefill
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert all(cache.numel() == 0 for cache in runner.kv_caches)


@pytest.mark.deberta_gliner
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": True}, "prefix"),
        ({"enable_chunked_prefill": True}, "chunked"),
    ],
)
def test_settings_that_would_give_wrong_results_stop_start_up(
    options: dict[str, Any], message: str, library: Library
) -> None:
    # vLLM itself may switch the setting off for an encoder (then nothing is wrong), or our model refuses it.
    try:
        with engine(library.prepared("span-v3"), **options) as llm:
            config = llm.llm_engine.vllm_config
            assert not config.cache_config.enable_prefix_caching
            assert not config.scheduler_config.enable_chunked_prefill
    except Exception as error:
        assert message in str(error).lower()  # noqa: PT017 (either outcome is right)


@pytest.mark.parametrize("name", each(["mmbert-span", "mmbert-token"]))
def test_our_attention_inside_vllm_s_modernbert_is_the_library_s(
    name: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in float32 on GPUs, where vLLM's own rounds; here it is asked for."""
    from vllm_factory.compat import own_attention

    monkeypatch.setattr(own_attention, "inexact_on_this_device", lambda _: True)
    want = [library.reference(name).predict_entities(text, LABELS, threshold=0.3) for text in TEXTS]
    with engine(library.prepared(name)) as llm:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert runner.model.own_attention.everything
        for got, expected in zip(ask(llm, text=TEXTS * 2, labels=LABELS, threshold=0.3), want * 2, strict=True):
            assert_same_entities(got, expected)
