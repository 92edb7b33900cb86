"""Models that read texts and images, without vLLM: prompts, counts and places of patches, requests, responses."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from image_files import LIMITS, REFUSED
from retrieval_harness import Golden, each, image_uri, request
from vllm_factory.errors import CheckpointError, RequestError
from vllm_factory.io.lfm2_vl import Lfm2Images
from vllm_factory.io.limits import Limits
from vllm_factory.io.qwen_vl import QwenImages
from vllm_factory.io.visual import VisualPipeline
from vllm_factory.plugins.collfm2.resizing import resizing_in_float
from vllm_factory.plugins.nemotron_colembed.writer import NemotronSettings, NemotronWriter
from vllm_factory.poolers.multivector import Role
from vllm_factory.published import Published
from vllm_factory.serving.target import find

QWENS = (Golden("colqwen3", "narrow"), Golden("colqwen3", "default"))
NEMOTRONS = (Golden("nemotron_colembed", "published"), Golden("nemotron_colembed", "short"))
LFM2S = tuple(Golden("collfm2", name) for name in ("tiles", "wide", "whole"))
GOLDENS = each(*QWENS, *NEMOTRONS, *LFM2S)
#: Of each image's prompt, the token that vLLM expands.
IMAGE_TOKENS = {"colqwen3": "<|image_pad|>", "nemotron_colembed": "<|image_pad|>", "collfm2": "<image>"}


def expanded(golden: Golden, pipeline: VisualPipeline, case: dict[str, Any]) -> tuple[list[int], int]:
    """Token ids of a case's prompt with the image's own in the place of the one, and how many were announced."""
    encoded = pipeline.encode(pipeline.parse(request(case)))
    (prompt,), tokenizer = encoded.prompts, pipeline.writer.tokenizer
    ids = prompt.token_ids
    if prompt.image is not None:
        at = ids.index(tokenizer.id_of(IMAGE_TOKENS[golden.plugin]))
        (item,) = encoded.state.items
        pieces = item.pieces()
        becomes = [tokenizer.id_of(piece["text"]) for piece in pieces if "box" in piece]
        ids = [*ids[:at], *becomes, *ids[at + 1 :]]
        assert len(pieces) == len(ids)
    return ids, int(prompt.arrays[0][2])


@pytest.mark.parametrize("golden", GOLDENS)
def test_tokens_are_the_library_s(golden: Golden) -> None:
    pipeline = golden.visual_pipeline()
    for case in golden.meta()["cases"]:
        want = golden.arrays()[f"{case['key']}_ids"]
        ids, announced = expanded(golden, pipeline, case)
        np.testing.assert_array_equal(ids, want, case["key"])
        assert announced == len(want)
        assert sum(i == pipeline.writer.image_token for i in ids) == case.get("patches", 0), case["key"]
    pipeline.loader.close()


@pytest.mark.parametrize("golden", GOLDENS)
def test_the_server_command_finds_the_plugin_and_the_longest_prompt(golden: Golden) -> None:
    target = find(str(golden.path), cache=Path("unused"))
    assert target.plugin is golden.spec
    assert target.overrides["architectures"] == [golden.spec.architecture]
    longest = max(len(golden.arrays()[f"{case['key']}_ids"]) for case in golden.meta()["cases"])
    assert target.max_tokens is not None
    assert longest <= target.max_tokens <= 8192


def sizes(number: int) -> list[tuple[int, int]]:
    draw = random.Random(0)
    found = [(1, 1), (332, 27), (27, 332), (1, 200), (3000, 20), (64, 64), (512, 512), (2480, 3508)]
    return [*found, *((draw.randint(1, 1500), draw.randint(1, 1500)) for _ in range(number))]


@pytest.mark.parametrize("golden", each(*QWENS))
def test_qwen_s_images_have_as_many_tokens_as_its_processor_says(golden: Golden) -> None:
    from transformers import AutoImageProcessor

    images = QwenImages.read(golden.published)
    processor = AutoImageProcessor.from_pretrained(str(golden.path))
    for width, height in sizes(60):
        if max(width, height) > 200 * min(width, height):
            continue
        pieces = images.pieces(Image.new("1", (width, height)))
        patches = processor.get_number_of_image_patches(height, width, {})
        assert len(pieces) == patches // processor.merge_size**2, (width, height)
        assert len(pieces) <= images.most_tokens + 200, "of an image that is no stripe"
        _check_boxes([box for _, box in pieces if box], width, height)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_thumbnail": False},
        {"do_image_splitting": False},
        {"min_tiles": 1, "max_tiles": 1},
        {"encoder_patch_size": 14, "tile_size": 84, "downsample_factor": 3, "max_tiles": 7},
        {"max_pixels_tolerance": 1.0, "min_image_tokens": 1, "max_image_tokens": 32, "tile_size": 128},
    ],
    ids=str,
)
@pytest.mark.collfm2
def test_lfm2_s_images_are_cut_as_its_processor_cuts_them(settings: dict[str, Any]) -> None:
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    processor = Lfm2VlImageProcessor(**settings)
    images = Lfm2Images.of(processor)
    for width, height in sizes(12):
        if width * height > 2_000_000:
            continue
        image = Image.new("RGB", (width, height))
        try:
            pieces = images.pieces(image)
        except RequestError:
            with pytest.raises(RuntimeError, match="equal size"):
                processor([Image.new("RGB", (8, 8)), image], return_row_col_info=True, return_tensors="pt")
            continue
        made = processor(image, return_row_col_info=True, return_tensors="pt")
        layout = images.layout(width, height)
        assert (layout.rows, layout.columns) == (int(made["image_rows"][0]), int(made["image_cols"][0]))
        assert images.images(width, height) == len(made["spatial_shapes"])
        down, across = (made["spatial_shapes"][-1] // processor.downsample_factor).tolist()
        if images.thumbnail or not layout.tiled:
            assert (layout.down, layout.across) == (down, across)
        factor = processor.downsample_factor
        tokens = sum(-(-h // factor) * -(-w // factor) for h, w in made["spatial_shapes"].tolist())
        assert sum(text == "<image>" for text, _ in pieces) == tokens
        assert len(pieces) <= images.most_tokens + images.max_tokens
        _check_boxes([box for _, box in pieces if box], width, height)


def _check_boxes(boxes: list[Any], width: int, height: int) -> None:
    """They lie in the image, and the first of each layer begin in its corner."""
    places = np.array(boxes)
    assert places.min() == 0
    assert places[:, 2].max() == pytest.approx(width)
    assert places[:, 3].max() == pytest.approx(height)
    assert (places[:, 2:] > places[:, :2]).all()


@pytest.mark.collfm2
def test_tiles_are_numbered_by_the_reference_s_habit() -> None:
    """A page has two columns and three rows; the reference says three and two, and checkpoints learnt that."""
    images = Lfm2Images.read(LFM2S[0].published)
    layout = images.layout(210, 297)
    assert (layout.columns, layout.rows) == (2, 3)
    markers = [text for text, _ in images.pieces(Image.new("1", (210, 297))) if text.startswith("<|img_row")]
    assert markers == [f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2, 3)]


@pytest.mark.collfm2
def test_a_configuration_may_name_the_base_model_that_holds_it(tmp_path: Path) -> None:
    from vllm_factory.compat.hf import ColLfm2Config

    whole = json.loads((LFM2S[0].path / "config.json").read_text())
    base = {key: value for key, value in whole.items() if key not in ("base_model", "dim", "architectures")}
    (tmp_path / "config.json").write_text(json.dumps({**base, "model_type": "lfm2_vl"}))
    small = ColLfm2Config.from_dict({"model_type": "collfm2", "base_model": str(tmp_path), "dim": 128})
    assert small.text_config.hidden_size == whole["text_config"]["hidden_size"]
    assert small.vision_config.patch_size == whole["vision_config"]["patch_size"]
    assert (small.model_type, small.dim, small.base_model) == ("collfm2", 128, str(tmp_path))
    assert ColLfm2Config.from_dict(whole).text_config.layer_types == whole["text_config"]["layer_types"]


@pytest.mark.collfm2
def test_resizing_rounds_what_float32_gives() -> None:
    import torch
    from torchvision.transforms.v2 import functional as tv
    from transformers import AutoImageProcessor

    processor = resizing_in_float(AutoImageProcessor.from_pretrained(str(LFM2S[2].path)))
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (61, 83, 3), dtype=np.uint8)
    made = processor(Image.fromarray(pixels), return_tensors="pt", return_row_col_info=True)
    height, width = (made["spatial_shapes"][0] * processor.encoder_patch_size).tolist()
    want = tv.resize(torch.tensor(pixels).permute(2, 0, 1).float()[None], [height, width], antialias=True).round()
    first = made["pixel_values"][0, 0].reshape(processor.encoder_patch_size, processor.encoder_patch_size, 3)
    got = (first * 0.5 + 0.5) * 255
    np.testing.assert_allclose(got, want[0, :, :4, :4].permute(1, 2, 0), atol=1e-3)


GOOD: dict[str, Any] = {"query": "one", "documents": ["two", {"image": image_uri("dot.png")}, {"text": "three"}]}
#: What a client may send, and what the message must say.
BAD: list[tuple[Any, str]] = [
    (None, "data: None; expected an object with text or image"),
    ({}, "text: the field is required, or image, or query and documents"),
    ({"text": None, "image": None}, "text: the field is required, or image"),
    ({"text": []}, "text: an empty list"),
    ({"text": ["a", 3]}, "text[1]: expected a string"),
    ({"text": "\ud800"}, "text: not valid Unicode"),
    ({"text": "a" * 2001}, "text: 2001 characters"),
    ({"image": []}, "image: an empty list"),
    ({"image": 3}, "image: expected a data URI or a URL, or a list of them"),
    ({"image": ["a", 3]}, "image[1]: expected a string"),
    ({"image": "/etc/passwd"}, "image: "),
    ({"image": ["data:image/png;base64,AA=="] * 5}, "image: 5 images; one request takes 4"),
    ({"image": image_uri("dot.png"), "is_query": True}, "is_query: true with image; queries are texts"),
    ({"image": image_uri("dot.png"), "text": "one"}, "text: given together with image"),
    ({"image": image_uri("dot.png"), "url": "one"}, "url: unknown field; known are"),
    ({"text": "a", "prompt_name": "query"}, "prompt_name: unknown field"),
    ({"text": "a", "pool_factor": 2, "is_query": True}, "pool_factor: 2 with is_query"),
    ({"query": "one"}, "documents: the field is required"),
    ({**GOOD, "query": {"image": "x"}}, "query: expected a string"),
    ({**GOOD, "documents": []}, "documents: an empty list"),
    ({**GOOD, "documents": [{}]}, "documents[0]: an empty object; expected text or image"),
    ({**GOOD, "documents": [{"image": 3}]}, "documents[0].image: expected a string"),
    ({**GOOD, "documents": ["a", {"image": "x"}]}, "documents[1].image: "),
    ({**GOOD, "documents": [{"pixels": 3}]}, "documents[0].pixels: unknown field"),
    ({**GOOD, "documents": [{"text": "a", "image": image_uri("dot.png")}]}, "documents[0].text: given together"),
    ({**GOOD, "documents": [None]}, "documents[0]: "),
    ({**GOOD, "documents": [{"text": "\ud800"}]}, "documents[0]: not valid Unicode"),
    ({**GOOD, "documents": ["a"] * 9}, "documents: 9 documents; one request takes 8"),
    ({**GOOD, "documents": [{"text": "a" * 2000}]}, "documents: 2003 characters with the query"),
    ({**GOOD, "documents": [{"image": image_uri("dot.png")}] * 5}, "documents: 5 images; one request takes 4"),
    ({**GOOD, "top_n": 0}, "top_n:"),
]


@pytest.fixture(scope="module")
def qwen() -> VisualPipeline:
    return QWENS[0].visual_pipeline(Limits(max_chars=2000, max_texts=8, max_images=4))


@pytest.mark.colqwen3
@pytest.mark.parametrize(("data", "message"), BAD, ids=[f"{i}-{m[:24]}" for i, (_, m) in enumerate(BAD)])
def test_bad_requests_are_refused_with_the_field(data: Any, message: str, qwen: VisualPipeline) -> None:
    with pytest.raises(RequestError) as error:
        qwen.parse(data)
    assert message in str(error.value)


@pytest.mark.colqwen3
def test_what_does_not_fit_the_server_is_refused_before_an_image_is_loaded(qwen: VisualPipeline) -> None:
    small = QWENS[0].visual_pipeline(max_tokens=40)
    for data, field in (
        ({"text": ["a", "word " * 60]}, r"text\[1\]: "),
        ({"text": "word " * 60, "is_query": True}, "text: "),
        ({"image": image_uri("page.png")}, "image: "),
        ({"query": "word " * 60, "documents": ["a"]}, "query: "),
        ({"query": "a", "documents": ["a", {"text": "word " * 60}]}, r"documents\[1\]: "),
        ({"query": "a", "documents": ["a", {"image": image_uri("page.png")}]}, r"documents\[1\].image: "),
        ({"text": ""}, "text: it has no token"),
    ):
        with pytest.raises(RequestError, match=field):
            small.encode(small.parse(data))


@pytest.mark.colqwen3
def test_a_ranking_keeps_the_order_of_texts_and_images(qwen: VisualPipeline) -> None:
    data = {**GOOD, "return_documents": True, "similarity": True}
    encoded = qwen.encode(qwen.parse(data))
    assert [prompt.image is not None for prompt in encoded.prompts] == [False, False, True, False]
    assert [int(prompt.arrays[0][0]) for prompt in encoded.prompts] == [Role.QUERY] + [Role.VECTORS] * 3
    arrays = [np.full((int(prompt.arrays[0][2]), 2), index + 1.0) for index, prompt in enumerate(encoded.prompts)]
    results = [(np.array(array.shape, np.int32), array.ravel()) for array in arrays]
    got = qwen.decode(encoded.state, results, 7)
    assert [(result["index"], result["document"]) for result in got["results"]] == [
        (2, "three"),
        (1, None),
        (0, "two"),
    ]
    image = got["results"][1]
    assert len(image["tokens"]) == image["similarity"]["shape"][1]
    boxes = [token["box"] for token in image["tokens"] if "box" in token]
    assert boxes[0] == [0.0, 0.0, 0.5, 0.5], "a quarter of one pixel"


@pytest.mark.nemotron_colembed
def test_nemotron_reads_an_image_with_its_text() -> None:
    pipeline = NEMOTRONS[0].visual_pipeline()
    page, pages = image_uri("dot.png"), [image_uri("dot.png"), image_uri("square.png")]
    both = pipeline.encode(pipeline.parse({"image": pages, "text": ["one", "two"]}))
    assert all(prompt.image is not None for prompt in both.prompts)
    for data, message in (
        ({"image": pages, "text": "one"}, "text: a list with one image, or one text with a list"),
        ({"image": pages, "text": ["one"]}, "text: 1 texts with 2 images"),
        ({"image": page, "text": "a <|image_pad|>"}, "text: it holds <|image_pad|>"),
    ):
        with pytest.raises(RequestError) as error:
            pipeline.encode(pipeline.parse(data))
        assert message in str(error.value)
    marker = {"query": "a", "documents": [{"image": page, "text": "a <|image_pad|>"}]}
    with pytest.raises(RequestError, match=r"documents\[0\].text: it holds"):
        pipeline.encode(pipeline.parse(marker))


@pytest.mark.nemotron_colembed
def test_an_image_that_the_passage_length_cuts_is_refused() -> None:
    golden = NEMOTRONS[1]
    writer = NemotronWriter.read(golden.published, 4096)
    settings = NemotronSettings(p_max_length=100, reserve_tokens_for_images=30)
    small = NemotronWriter(settings, writer.tokenizer, writer.images, 4096)
    pipeline = VisualPipeline(small, Limits())
    with pytest.raises(RequestError, match="image: 35 tokens; 100 take no such image"):
        pipeline.encode(pipeline.parse({"image": image_uri("large_page.png")}))


@pytest.mark.nemotron_colembed
def test_settings_of_another_type_are_refused(tmp_path: Path) -> None:
    shutil.copytree(NEMOTRONS[0].path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "processor_config.json").write_text(json.dumps({"q_max_length": "long"}))
    with pytest.raises(CheckpointError, match="q_max_length is 'long'"):
        NemotronWriter.read(Published(tmp_path, "x"), 512)
    (tmp_path / "processor_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content[-1].text[:3] }}")
    with pytest.raises(CheckpointError, match="chat template does not write a user's text once"):
        NemotronWriter.read(Published(tmp_path, "x"), 512)


@pytest.mark.colqwen3
def test_a_tokenizer_without_the_image_token_is_refused(tmp_path: Path) -> None:
    shutil.copytree(QWENS[0].path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("image_pad", "image_bad"))
    from vllm_factory.plugins.colqwen3.writer import ColQwen3Writer

    with pytest.raises(CheckpointError, match="image token"):
        ColQwen3Writer.read(Published(tmp_path, "x"), 512)


def test_bounds_on_images_are_the_operator_s() -> None:
    pipeline = QWENS[0].visual_pipeline(LIMITS)
    large = pipeline.parse({"image": REFUSED["too many pixels"][0]})
    with pytest.raises(RequestError, match="700x700 pixels are more than 400000"):
        pipeline.encode(large)
