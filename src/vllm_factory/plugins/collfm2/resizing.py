"""Resizing as the reference does it, whatever the versions of torchvision and the kind of CPU. No vLLM import."""

from __future__ import annotations

from typing import Any


def resizing_in_float(image_processor: Any) -> Any:
    """The same image processor, which resizes in float32 and rounds to whole numbers.

    torchvision has two ways to resize bytes bilinearly: in float32, rounded; or by a kernel in whole numbers, which
    is off by one now and then. Which one runs depends on its version and on the CPU (up to 0.23 on whether PyTorch
    reports AVX2 and not AVX512). The first is what the reference runs on servers of today, and the more exact.

    Args:
        image_processor: LFM2-VL's of transformers, on torchvision.
    """
    kind = type(image_processor)

    class Resizing(kind):  # type: ignore[misc, valid-type]
        def resize_and_split(self, images: Any, *arguments: Any, **options: Any) -> Any:
            pictures, *rest = super().resize_and_split(images.float(), *arguments, **options)
            return [[tile.round() for tile in tiles] for tiles in pictures], *rest

    return Resizing.from_dict(image_processor.to_dict())
