"""What stands around texts and images for ColLFM2, as sauerkrautlm-colpali 0.1.0 writes it. No vLLM import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_factory.io.lfm2_vl import IMAGE, Lfm2Images
from vllm_factory.io.multivector import Written
from vllm_factory.io.texts import TextTokenizer
from vllm_factory.io.visual import VisualWriter, one_image_token
from vllm_factory.published import Published

if TYPE_CHECKING:
    from PIL import Image

IMAGE_PROMPT = f"<|im_start|>user\n{IMAGE}Describe the image.<|im_end|>"


class ColLfm2Writer(VisualWriter):
    """See :class:`~vllm_factory.io.visual.VisualWriter`. Queries and documents that are texts are written alike."""

    def __init__(self, tokenizer: TextTokenizer, images: Lfm2Images, max_tokens: int) -> None:
        super().__init__(tokenizer, max_tokens)
        self.images = images
        self.image_token = one_image_token(tokenizer, IMAGE_PROMPT, IMAGE)

    @classmethod
    def read(cls, checkpoint: Published, max_tokens: int) -> ColLfm2Writer:
        """From the checkpoint's files."""
        return cls(TextTokenizer.as_saved(checkpoint), Lfm2Images.read(checkpoint), max_tokens)

    def query(self, text: str) -> Written:
        """See the base class."""
        return self.within("", text, "")

    def text(self, text: str) -> Written:
        """See the base class."""
        return self.within("", text, "")

    def image(self, image: Image.Image, text: str | None) -> Written:
        """See the base class."""
        # The library's processor adds no special tokens to a prompt with an image; its tokenizer does to a text.
        prompt = self.within(IMAGE_PROMPT, "", "", special=False)
        return self.around_image(prompt, image, self.image_token, self.images.pieces(image))
