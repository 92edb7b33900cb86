"""What stands around texts and images for ColQwen3, as sauerkrautlm-colpali 0.1.0 writes it. No vLLM import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_factory.io.multivector import Written
from vllm_factory.io.qwen_vl import IMAGE_PAD, VISION_END, VISION_START, QwenImages
from vllm_factory.io.texts import TextTokenizer
from vllm_factory.io.visual import VisualWriter, one_image_token
from vllm_factory.published import Published

if TYPE_CHECKING:
    from PIL import Image

QUERY_PREFIX = "Query: "
#: Tokens behind a query that get vectors of their own.
QUERY_SUFFIX = "<|endoftext|>" * 10
IMAGE_PROMPT = f"<|im_start|>user\n{VISION_START}{IMAGE_PAD}{VISION_END}Describe the image.<|im_end|><|endoftext|>"


class ColQwen3Writer(VisualWriter):
    """See :class:`~vllm_factory.io.visual.VisualWriter`."""

    def __init__(self, tokenizer: TextTokenizer, images: QwenImages, max_tokens: int) -> None:
        super().__init__(tokenizer, max_tokens)
        self.images = images
        self.image_token = one_image_token(tokenizer, IMAGE_PROMPT, IMAGE_PAD)

    @classmethod
    def read(cls, checkpoint: Published, max_tokens: int) -> ColQwen3Writer:
        """From the checkpoint's files."""
        return cls(TextTokenizer.as_saved(checkpoint), QwenImages.read(checkpoint), max_tokens)

    def query(self, text: str) -> Written:
        """See the base class."""
        return self.within(QUERY_PREFIX, text, QUERY_SUFFIX)

    def text(self, text: str) -> Written:
        """See the base class."""
        return self.within("", text, "")

    def image(self, image: Image.Image, text: str | None) -> Written:
        """See the base class."""
        prompt = self.within(IMAGE_PROMPT, "", "")
        return self.around_image(prompt, image, self.image_token, self.images.pieces(image))
