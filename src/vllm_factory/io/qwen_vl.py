"""Images in prompts of Qwen3-VL: how many tokens one becomes, and where each token's patch is. No vLLM import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_factory.errors import RequestError
from vllm_factory.io.visual import Piece, grid
from vllm_factory.published import Published

if TYPE_CHECKING:
    from PIL import Image

#: Tokens around an image in Qwen's prompts; the middle one is expanded.
VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


#: The longest text that is served, unless the operator asks for more: the library sets no bound of its own.
LONGEST_TEXT = 8192
#: Room for what stands around an image.
_AROUND = 64


def longest_prompt(checkpoint: Published) -> int:
    """Tokens of the longest prompt: the largest image that the image processor makes, or a long text."""
    return checkpoint.within_positions(max(QwenImages.read(checkpoint).most_tokens + _AROUND, LONGEST_TEXT))


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImages:
    """What the checkpoint's image processor does with an image.

    Attributes:
        cell: Side in pixels of what becomes one token: a patch times the patches that are merged.
        min_pixels, max_pixels: Images are resized to lie between.
    """

    cell: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def read(cls, checkpoint: Published) -> QwenImages:
        """From the checkpoint's files."""
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(str(checkpoint.path))
        size = processor.size
        return cls(
            cell=processor.patch_size * processor.merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest image."""
        return self.max_pixels // self.cell**2

    def pieces(self, image: Image.Image) -> list[Piece]:
        """The tokens that one image becomes, and where in the image each patch is.

        Raises:
            RequestError: It is longer or taller than the image processor takes.
        """
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        try:
            height, width = smart_resize(image.height, image.width, self.cell, self.min_pixels, self.max_pixels)
        except ValueError as error:
            raise RequestError("image", str(error)) from error
        cells = grid((0.0, 0.0, image.width, image.height), height // self.cell, width // self.cell)
        return [(IMAGE_PAD, cell) for cell in cells]
