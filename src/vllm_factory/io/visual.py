"""Requests of retrieval models that read texts and page images. No vLLM import.

What stands around a text or an image is the plugin's (:class:`VisualWriter`); everything else is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_factory.errors import CheckpointError, RequestError
from vllm_factory.io.images import ImageLoader, ImageSource
from vllm_factory.io.limits import Limits
from vllm_factory.io.multivector import MultiVectorPipeline, RankState, VectorsState, Written, written_text
from vllm_factory.io.ner import check_texts, validated
from vllm_factory.io.retrieval import (
    Document,
    VisualRankRequest,
    VisualRequest,
    check_pool_factor,
    check_ranking,
)
from vllm_factory.io.texts import TextTokenizer

if TYPE_CHECKING:
    from PIL import Image

#: Place of a patch in an image: left, top, right, bottom, in pixels of the upright image.
Box = tuple[float, float, float, float]
#: One of the tokens that an image becomes: its text, and where its patch is; ``None`` for what stands between.
Piece = tuple[str, Box | None]


class VisualWriter(ABC):
    """How one model's texts and images become tokens.

    Args:
        tokenizer: The checkpoint's.
        max_tokens: Most tokens of a prompt that the server takes.
    """

    #: Whether a document may be an image and a text at once.
    reads_both = False

    def __init__(self, tokenizer: TextTokenizer, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens

    @abstractmethod
    def query(self, text: str) -> Written:
        """A query."""

    @abstractmethod
    def text(self, text: str) -> Written:
        """A document that is a text."""

    @abstractmethod
    def image(self, image: Image.Image, text: str | None) -> Written:
        """A document that is an image; ``text`` only where the model :attr:`reads_both`."""

    def within(
        self, before: str, text: str, behind: str, *, special: bool = True, longest: int | None = None
    ) -> Written:
        """A text with what the model wants around it.

        Args:
            before: Before it.
            text: The client's.
            behind: Behind it.
            special: Add what the tokenizer adds to every text.
            longest: Keep so many of the first tokens.
        """
        tokens = self.tokenizer.encode_within(before, text, behind, special=special)
        return written_text(text, tokens if longest is None else tokens.first(longest), self.tokenizer)

    def around_image(self, prompt: Written, image: Image.Image, image_token: int, becomes: list[Piece]) -> Written:
        """A written prompt with an image in the place of its one image token.

        Args:
            prompt: The prompt.
            image: The picture.
            image_token: The token that vLLM expands.
            becomes: What it expands to.

        Raises:
            RequestError: The text beside the image holds an image token, too.
        """
        if prompt.token_ids.count(image_token) != 1:
            raise RequestError("text", f"it holds {self.tokenizer.token(image_token)}, which stands for an image")
        at = prompt.token_ids.index(image_token)

        def pieces() -> list[dict[str, Any]]:
            found = prompt.pieces()
            patches = [_piece(text, box) for text, box in becomes]
            return [*found[:at], *patches, *found[at + 1 :]]

        return Written(
            token_ids=prompt.token_ids,
            num_tokens=prompt.num_tokens - 1 + len(becomes),
            pieces=pieces,
            skipped=prompt.skipped,
            truncated=prompt.truncated,
            image=image,
        )


def _piece(text: str, box: Box | None) -> dict[str, Any]:
    place = None if box is None else [round(side, 2) for side in box]
    return {"text": text, "start": None, "end": None, "box": place}


def grid(box: Box, rows: int, columns: int) -> list[Box]:
    """The cells of a box, row by row."""
    left, top, right, bottom = box
    across = list(pairwise(np.linspace(left, right, columns + 1).tolist()))
    down = list(pairwise(np.linspace(top, bottom, rows + 1).tolist()))
    return [(x0, y0, x1, y1) for (y0, y1), (x0, x1) in product(down, across)]


def one_image_token(tokenizer: TextTokenizer, prompt: str, token: str) -> int:
    """Id of the image token, which stands in the prompt once.

    Raises:
        CheckpointError: It does not.
    """
    token_id = tokenizer.id_of(token)
    if token not in tokenizer or tokenizer.encode_within("", prompt, "").ids.count(token_id or 0) != 1:
        raise CheckpointError(f"the checkpoint's tokenizer does not know the image token {token!r}")
    assert token_id is not None
    return token_id


class VisualPipeline(MultiVectorPipeline[VisualRequest, VisualRankRequest]):
    """Requests of a model that reads texts and images; see :class:`~vllm_factory.io.pipeline.Pipeline`.

    Args:
        writer: The model's way of writing queries and documents.
        limits: Bounds on requests.
        loader: Reads images; by the operator's environment when absent.
    """

    def __init__(self, writer: VisualWriter, limits: Limits, loader: ImageLoader | None = None) -> None:
        super().__init__(limits)
        self.writer = writer
        self.loader = loader or ImageLoader(limits)

    def parse(self, data: Any) -> VisualRequest | VisualRankRequest:
        """See :class:`~vllm_factory.io.pipeline.Pipeline`."""
        if isinstance(data, dict) and ("query" in data or "documents" in data):
            ranking = validated(VisualRankRequest, data, "an object with query and documents")
            check_ranking(ranking, self.limits)
            self._check_documents(ranking)
            return ranking
        request = validated(VisualRequest, data, "an object with text or image, or query and documents")
        self._check_request(request)
        check_pool_factor(request)
        return request

    def write(self, request: VisualRequest) -> VectorsState[VisualRequest]:
        """See :class:`~vllm_factory.io.multivector.MultiVectorPipeline`."""
        texts, sources = _listed(request.text), _sources(request)
        if sources is None:
            fields = ["text"] if request.single else [f"text[{index}]" for index in range(len(texts or ()))]
            write = self.writer.query if request.is_query else self.writer.text
            items = [self._fitting(field, write(text)) for field, text in zip(fields, texts or (), strict=True)]
        else:
            images = self.loader.load(sources)
            beside: Sequence[str | None] = texts or [None] * len(images)
            items = [self._image(*each) for each in zip(sources, images, beside, strict=True)]
        return VectorsState(request, tuple(items), request.single)

    def write_ranking(self, request: VisualRankRequest) -> RankState[VisualRankRequest]:
        """See :class:`~vllm_factory.io.multivector.MultiVectorPipeline`."""
        query = self._fitting("query", self.writer.query(request.query))
        # Texts first: what does not fit is refused before an image is fetched.
        written = {
            index: self._fitting(f"documents[{index}]", self.writer.text(document.text))
            for index, document in enumerate(request.items)
            if document.image is None and document.text is not None
        }
        sources = _document_sources(request.items)
        images = self.loader.load(list(sources.values()))
        for (index, source), image in zip(sources.items(), images, strict=True):
            written[index] = self._image(source, image, request.items[index].text)
        documents = tuple(written[index] for index in range(len(written)))
        return RankState(request, query, documents, request.texts)

    def _check_request(self, request: VisualRequest) -> None:
        sources = _sources(request)
        if request.text is not None:
            check_texts(request.text, self.limits)
        if sources is None:
            if request.text is None:
                raise RequestError("text", "the field is required, or image, or query and documents")
            return
        if not sources:
            raise RequestError("image", "an empty list; expected at least one image")
        if request.is_query:
            raise RequestError("is_query", "true with image; queries are texts")
        if request.text is not None:
            self._check_both("text")
            if isinstance(request.text, list) != isinstance(request.image, list):
                raise RequestError("text", "a list with one image, or one text with a list; send both alike")
            if len(_listed(request.text) or ()) != len(sources):
                raise RequestError("text", f"{len(request.text)} texts with {len(sources)} images")
        self.loader.check(sources)

    def _check_documents(self, request: VisualRankRequest) -> None:
        for index, document in enumerate(request.items):
            field = f"documents[{index}]"
            if document.text is None and document.image is None:
                raise RequestError(field, "an empty object; expected text or image")
            if document.text is not None and document.image is not None:
                self._check_both(f"{field}.text")
        self.loader.check(list(_document_sources(request.items).values()))

    def _check_both(self, field: str) -> None:
        if not self.writer.reads_both:
            raise RequestError(field, "given together with image; this model reads one or the other")

    def _image(self, source: ImageSource, image: Image.Image, text: str | None) -> Written:
        try:
            written = self.writer.image(image, text)
        except RequestError as error:
            # The writer does not know where in the request its image, or the text beside it, stands.
            raise RequestError(source.field.replace("image", error.field), error.problem) from error
        return self._fitting(source.field, written)

    def _fitting(self, field: str, written: Written) -> Written:
        if written.num_tokens > self.writer.max_tokens:
            raise RequestError(
                field, f"{written.num_tokens} tokens; this server takes {self.writer.max_tokens} at once"
            )
        if not written.num_tokens:
            raise RequestError(field, "it has no token")
        return written


def _listed(value: str | list[str] | None) -> list[str] | None:
    return [value] if isinstance(value, str) else value


def _sources(request: VisualRequest) -> list[ImageSource] | None:
    if request.image is None:
        return None
    if isinstance(request.image, str):
        return [ImageSource("image", request.image)]
    return [ImageSource(f"image[{index}]", each) for index, each in enumerate(request.image)]


def _document_sources(documents: Sequence[Document]) -> dict[int, ImageSource]:
    """Where images are, by the document's index."""
    return {
        index: ImageSource(f"documents[{index}].image", document.image)
        for index, document in enumerate(documents)
        if document.image is not None
    }
