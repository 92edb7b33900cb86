"""What stands around texts and images for Nemotron ColEmbed, as its published processor writes it. No vLLM import.

The processor is that of ``nvidia/nemotron-colembed-vl-4b-v2``: prefixes and lengths stand in the checkpoint's
``processor_config.json``, the rest in its chat template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_factory.errors import CheckpointError, RequestError, shown
from vllm_factory.io.multivector import Written
from vllm_factory.io.qwen_vl import IMAGE_PAD, QwenImages
from vllm_factory.io.texts import TextTokenizer
from vllm_factory.io.visual import VisualWriter, one_image_token
from vllm_factory.published import Published

if TYPE_CHECKING:
    from PIL import Image

PROCESSOR_FILE = "processor_config.json"
#: Stands for the text while the chat template is applied.
_TEXT = "\x02text\x03"


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronSettings:
    """What ``processor_config.json`` says, with the published processor's defaults.

    Attributes:
        query_prefix, passage_prefix: Stand before every query and every document's text.
        q_max_length: Most tokens of a query, which is cut there.
        p_max_length: Most tokens of a document.
        reserve_tokens_for_images: So many of them are left free where there is an image.
    """

    query_prefix: str = "query:"
    passage_prefix: str = "passage:"
    q_max_length: int = 512
    p_max_length: int = 4096
    reserve_tokens_for_images: int = 100

    @classmethod
    def read(cls, checkpoint: Published) -> NemotronSettings:
        """From the checkpoint's files.

        Raises:
            CheckpointError: A setting has another type than the published processor's.
        """
        saved = checkpoint.table(PROCESSOR_FILE, missing_ok=True)
        given = {key: saved[key] for key in cls.__slots__ if saved.get(key) is not None}
        for key, value in given.items():
            if type(value) is not type(getattr(cls(), key)):
                raise CheckpointError(f"{checkpoint.name}: {PROCESSOR_FILE}: {key} is {shown(value)}")
        return cls(**given)


def longest_prompt(checkpoint: Published) -> int:
    """Tokens of the longest prompt: a document's, or a query's."""
    settings = NemotronSettings.read(checkpoint)
    return checkpoint.within_positions(max(settings.p_max_length, settings.q_max_length))


class NemotronWriter(VisualWriter):
    """See :class:`~vllm_factory.io.visual.VisualWriter`.

    Raises:
        CheckpointError: The checkpoint has no usable chat template.
    """

    reads_both = True

    def __init__(
        self, settings: NemotronSettings, tokenizer: TextTokenizer, images: QwenImages, max_tokens: int
    ) -> None:
        super().__init__(tokenizer, max_tokens)
        self.settings = settings
        self.images = images
        self._query = self._around(f"Query: {_prefixed(settings.query_prefix)}")
        self._passage = self._around(_prefixed(settings.passage_prefix))
        self._page = self._around(_prefixed(settings.passage_prefix), {"type": "image"})
        self.image_token = one_image_token(tokenizer, self._page[0], IMAGE_PAD)

    @classmethod
    def read(cls, checkpoint: Published, max_tokens: int) -> NemotronWriter:
        """From the checkpoint's files."""
        tokenizer = TextTokenizer.as_saved(checkpoint)
        return cls(NemotronSettings.read(checkpoint), tokenizer, QwenImages.read(checkpoint), max_tokens)

    def query(self, text: str) -> Written:
        """See the base class."""
        before, behind = self._query
        return self.within(before, text, behind, longest=self.settings.q_max_length)

    def text(self, text: str) -> Written:
        """See the base class. The published processor takes no text alone: this is its page without the image."""
        before, behind = self._passage
        return self.within(before, text, behind, longest=self._beside_images(0))

    def image(self, image: Image.Image, text: str | None) -> Written:
        """See the base class.

        The published processor cuts the whole prompt, its image's tokens counted, at what ``p_max_length`` leaves
        beside the image's tokens and those reserved.
        """
        becomes = self.images.pieces(image)
        before, behind = self._page
        # All that may stay beside the image, which is one token here.
        longest = self._beside_images(len(becomes)) - len(becomes) + 1
        prompt = self.within(before, text or "", behind, longest=longest)
        if self.image_token not in prompt.token_ids:
            raise RequestError("image", f"{len(becomes)} tokens; {self.settings.p_max_length} take no such image")
        return self.around_image(prompt, image, self.image_token, becomes)

    def _beside_images(self, tokens: int) -> int:
        """Most tokens of a document whose images have so many; the processor counts those twice."""
        return self.settings.p_max_length - tokens - self.settings.reserve_tokens_for_images

    def _around(self, prefix: str, *content: dict[str, Any]) -> tuple[str, str]:
        """What the chat template puts before and behind a user's text."""
        message = {"role": "user", "content": [*content, {"type": "text", "text": prefix + _TEXT}]}
        try:
            written = self.tokenizer.tokenizer.apply_chat_template(
                [message], tokenize=False, add_generation_prompt=True
            )
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's chat template cannot be applied: {error}") from error
        before, found, behind = written.partition(_TEXT)
        if not found or _TEXT in behind:
            raise CheckpointError("the checkpoint's chat template does not write a user's text once")
        return before, behind


def _prefixed(prefix: str) -> str:
    return f"{prefix} " if prefix else ""
