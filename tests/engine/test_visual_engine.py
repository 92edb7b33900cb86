"""Models that read texts and images, inside vLLM: vectors and scores equal the library's, alone and together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_engine import engine

from retrieval_harness import Golden, ask, assert_same_vectors, decoded, document, each, image_uri, request, vectors
from vllm_factory.errors import RequestError
from vllm_factory.io.visual import VisualPipeline
from vllm_factory.poolers import multivector
from vllm_factory.poolers.multivector import maxsim
from vllm_factory.pooling import transport
from vllm_factory.pooling.protocol import Status

pytestmark = pytest.mark.engine
vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install")

GOLDENS = each(
    *(Golden("colqwen3", name) for name in ("narrow", "default")),
    *(Golden("nemotron_colembed", name) for name in ("published", "short")),
    *(Golden("collfm2", name) for name in ("tiles", "wide", "whole")),
)
#: Vectors of a request alone and in a crowd.
BATCH_TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=GOLDENS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Golden, Any]]:
    """A golden checkpoint and an engine that serves it."""
    golden: Golden = request.param
    with engine(golden.path, **golden.engine_options()) as llm:
        yield golden, llm


def test_vectors_equal_the_library_s(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    cases = golden.meta()["cases"]
    assert sum("image" in case for case in cases) >= 8
    for case in cases:
        response = ask(llm, **request(case))
        assert_same_vectors(vectors(response)[0], golden.arrays()[case["key"]], case["key"])
        tokens = len(golden.arrays()[f"{case['key']}_ids"])
        assert response["usage"]["prompt_tokens"] == response["embeddings"]["tokens"] == tokens


def test_neighbours_change_nothing(served: tuple[Golden, Any]) -> None:
    """64 queries, texts and images of all sizes, given to the engine at once."""
    golden, llm = served
    draw = random.Random(0)
    cases = [draw.choice(golden.meta()["cases"]) for _ in range(64)]
    pipeline = golden.visual_pipeline()
    prompts = [pipeline.encode(pipeline.parse(request(case))).prompts[0] for case in cases]
    blobs = [transport.pack(pipeline.blob_kind, i, prompt.arrays) for i, prompt in enumerate(prompts)]
    outputs = llm.encode(
        [
            {"prompt_token_ids": prompt.token_ids}
            | ({"multi_modal_data": {"image": prompt.image}} if prompt.image else {})
            for prompt in prompts
        ],
        [vllm.PoolingParams(task=pipeline.task, extra_kwargs={transport.EXTRA_KWARG: blob}) for blob in blobs],
        pooling_task=pipeline.task,
        use_tqdm=False,
    )
    for case, output in zip(cases, outputs, strict=True):
        blob = transport.unpack(output.outputs.data.numpy().tobytes())
        assert Status(blob.status) is Status.OK
        got = blob.arrays[1].reshape(blob.arrays[0].tolist())
        np.testing.assert_allclose(got, golden.arrays()[case["key"]], atol=BATCH_TOLERANCE, rtol=0)
        np.testing.assert_allclose(got, vectors(ask(llm, **request(case)))[0], atol=BATCH_TOLERANCE, rtol=0)


def test_scores_equal_the_library_s(served: tuple[Golden, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    golden, llm = served
    meta, scores = golden.meta(), golden.arrays()["scores"]
    documents = list(map(document, meta["documents"]))
    scored: list[int] = []

    def counted(*arguments: Any) -> Any:
        scored.append(len(arguments[0]))
        return maxsim(*arguments)

    monkeypatch.setattr(multivector, "maxsim", counted)
    for index, query in enumerate(meta["queries"]):
        results = ask(llm, query=query, documents=documents)["results"]
        assert [r["score"] for r in results] == sorted((r["score"] for r in results), reverse=True)
        got = {result["index"]: result["score"] for result in results}
        np.testing.assert_allclose([got[i] for i in range(len(got))], scores[index], rtol=1e-4, atol=1e-4)
    assert sum(scored) == len(documents) * len(meta["queries"]), "all of them beside the model"


def test_similarities_are_of_words_and_patches(served: tuple[Golden, Any]) -> None:
    golden, llm = served
    query, width, height = "Who runs Apple?", 210, 297
    response = ask(
        llm,
        query=query,
        documents=[{"image": image_uri("page.png")}, {"text": "one"}],
        similarity=True,
        output="base64",
    )
    page = next(result for result in response["results"] if result["index"] == 0)
    matrix = decoded(page["similarity"])
    assert matrix.shape == (len(response["query"]["tokens"]), len(page["tokens"]))
    np.testing.assert_allclose(matrix.max(1).sum(), page["score"], rtol=1e-5)
    boxes = np.array([token["box"] for token in page["tokens"] if token.get("box")])
    case = next(case for case in golden.meta()["cases"] if case["key"] == "image_page")
    assert len(boxes) == case["patches"]
    assert boxes.min() == 0
    assert (boxes[:, 2].max(), boxes[:, 3].max()) == (width, height)
    assert (boxes[:, 0] < boxes[:, 2]).all()
    assert (boxes[:, 1] < boxes[:, 3]).all()


def test_patches_lie_where_they_say(served: tuple[Golden, Any]) -> None:
    """Of two pages that differ in one corner, the patches of that corner differ most."""
    import io
    from base64 import b64encode

    from PIL import Image, ImageDraw

    _, llm = served

    def uri(mark: bool) -> str:
        page = Image.new("RGB", (160, 96), "white")
        if mark:
            ImageDraw.Draw(page).rectangle((128, 0, 159, 23), fill="black")
        buffer = io.BytesIO()
        page.save(buffer, "PNG")
        return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"

    plain, marked_page = (vectors(ask(llm, image=uri(mark)))[0] for mark in (False, True))
    response = ask(llm, query="a", documents=[{"image": uri(True)}], similarity=True)
    tokens = response["results"][0]["tokens"]
    distance = np.linalg.norm(plain - marked_page, axis=-1)
    patches = [place for place, token in enumerate(tokens) if token.get("box")]
    farthest = max(patches, key=lambda place: distance[place])
    left, top, right, bottom = tokens[farthest]["box"]
    assert right > 128, tokens[farthest]
    assert left < 160
    assert top < 24, tokens[farthest]
    assert bottom > 0


def test_what_a_client_may_write_hurts_nobody(served: tuple[Golden, Any]) -> None:
    """Markers in texts, images that do not fit, vLLM's own requests, any blob; the next request is answered."""
    golden, llm = served
    markers = "<|image_pad|> <|vision_start|> <image> <|img_thumbnail|> <|video_pad|> <|im_end|>"
    for data in (
        {"text": markers},
        {"text": markers, "is_query": True},
        {"query": markers, "documents": [markers]},
    ):
        assert ask(llm, **data)
    with pytest.raises(RequestError, match=r"^image: "):
        ask(llm, image="data:image/png;base64,AAAA")
    kind = VisualPipeline.blob_kind
    bad = [b"", transport.pack(kind, 0, (np.array([0, 0, 4], np.int64), np.empty(0, np.int32)))]
    params = [vllm.PoolingParams(task="token_embed")] + [
        vllm.PoolingParams(task="token_embed", extra_kwargs={transport.EXTRA_KWARG: blob}) for blob in bad
    ]
    outputs = llm.encode([{"prompt_token_ids": [1, 2, 3]}] * len(params), params, pooling_task="token_embed")
    statuses = [transport.unpack(o.outputs.data.numpy().tobytes()).status for o in outputs[1:]]
    assert statuses == [Status.BAD_BLOB] * len(bad)
    case = golden.meta()["cases"][0]
    assert_same_vectors(vectors(ask(llm, **request(case)))[0], golden.arrays()[case["key"]])
