"""vLLM's processing of images for Qwen3-VL, for checkpoints that have nothing to do with videos."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from vllm.model_executor.models.colqwen3 import ColQwen3ProcessingInfo


class ImagesOnly(ColQwen3ProcessingInfo):  # type: ignore[misc]
    """Images; ``--limit-mm-per-prompt`` keeps videos out.

    Retrieval checkpoints are published with or without ``video_preprocessor_config.json``; transformers' processor
    cannot be loaded without. So it is put together here, from the checkpoint's image processor and its tokenizer.
    """

    def get_hf_processor(self, **kwargs: object) -> Any:
        """The processor of transformers."""
        model = self.ctx.model_config
        return _processor(model.model, model.revision, self.get_tokenizer())


@lru_cache(maxsize=4)
def _processor(model: str, revision: str | None, tokenizer: Any) -> Any:
    from transformers import AutoImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    images = AutoImageProcessor.from_pretrained(model, revision=revision)
    # It wants one for videos as well; no video is ever given to it.
    return Qwen3VLProcessor(image_processor=images, tokenizer=tokenizer, video_processor=Qwen3VLVideoProcessor())
