"""Images in prompts of LFM2-VL: tiles, thumbnail, tokens, and where each token's patch is. No vLLM import."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_factory.errors import RequestError
from vllm_factory.io.visual import Box, Piece, grid
from vllm_factory.published import Published

if TYPE_CHECKING:
    from PIL import Image

#: The longest text that is served, unless the operator asks for more; the library names it and does not cut there.
LONGEST_TEXT = 2048
#: Room for what stands around an image.
_AROUND = 64

IMAGE, IMAGE_START, IMAGE_END = "<image>", "<|image_start|>", "<|image_end|>"
THUMBNAIL = "<|img_thumbnail|>"


def longest_prompt(checkpoint: Published) -> int:
    """Tokens of the longest prompt: the largest image that the image processor makes, or a long text."""
    return checkpoint.within_positions(max(Lfm2Images.read(checkpoint).most_tokens + _AROUND, LONGEST_TEXT))


@dataclass(frozen=True, slots=True)
class Layout:
    """What becomes of one image.

    Attributes:
        columns, rows: Tiles; one by one for an image that is only resized.
        across, down: Tokens of the whole image, resized (the thumbnail, or all there is).
    """

    columns: int
    rows: int
    across: int
    down: int

    @property
    def tiled(self) -> bool:
        """Whether the image is cut into tiles."""
        return self.columns * self.rows > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Images:
    """What the checkpoint's image processor does with an image.

    Attributes:
        cell: Side in pixels of what becomes one token: an encoder patch times the downsampling.
        patch: Side of an encoder patch.
        tile: Side of a tile.
        min_tiles, max_tiles: Tiles of a large image; both 1 where images are not cut.
        min_tokens, max_tokens: Tokens of an image that is resized.
        tolerance: An image is large from so many times the most tokens.
        thumbnail: Whether the whole image follows its tiles.
    """

    cell: int
    patch: int
    tile: int
    min_tiles: int
    max_tiles: int
    min_tokens: int
    max_tokens: int
    tolerance: float
    thumbnail: bool

    @classmethod
    def read(cls, checkpoint: Published) -> Lfm2Images:
        """From the checkpoint's files."""
        from transformers import AutoImageProcessor

        return cls.of(AutoImageProcessor.from_pretrained(str(checkpoint.path)))

    @classmethod
    def of(cls, processor: Any) -> Lfm2Images:
        """Of an image processor of transformers."""
        return cls(
            cell=processor.encoder_patch_size * processor.downsample_factor,
            patch=processor.encoder_patch_size,
            tile=processor.tile_size,
            min_tiles=processor.min_tiles if processor.do_image_splitting else 1,
            max_tiles=processor.max_tiles if processor.do_image_splitting else 1,
            min_tokens=processor.min_image_tokens,
            max_tokens=processor.max_image_tokens,
            tolerance=processor.max_pixels_tolerance,
            thumbnail=processor.use_thumbnail,
        )

    @property
    def tile_side(self) -> int:
        """Tokens along a tile's side."""
        return math.ceil(self.tile // self.patch / (self.cell // self.patch))

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest image, with the markers between its tiles."""
        tiles = self.max_tiles * (self.tile_side**2 + 1) if self.max_tiles > 1 else 0
        return tiles + self.max_tokens + 3

    def layout(self, width: int, height: int) -> Layout:
        """What becomes of an image of this size in pixels."""
        across, down = self._resized(width, height)
        if self._large(width, height) and self.max_tiles > 1:
            columns, rows = self._tiles(width, height)
        else:
            columns = rows = 1
        return Layout(columns, rows, across, down)

    def pieces(self, image: Image.Image) -> list[Piece]:
        """The tokens that one image becomes, and where in the image each patch is.

        Raises:
            RequestError: It is so long or so tall that the image processor has no room for its patches.
        """
        layout = self.layout(image.width, image.height)
        room = max(self.max_tokens, self.tile_side**2 if self.max_tiles > 1 else 0)
        if layout.across * layout.down > room:
            raise RequestError(
                "image",
                f"{image.width}x{image.height} pixels are {layout.across * layout.down} tokens in a row; "
                f"this model reads {room}",
            )
        whole = (0.0, 0.0, float(image.width), float(image.height))
        found: list[Piece] = [(IMAGE_START, None)]
        if layout.tiled:
            tiles = grid(whole, layout.rows, layout.columns)
            for marker, tile in zip(_markers(layout), tiles, strict=True):
                found += [(marker, None), *_patches(tile, self.tile_side, self.tile_side)]
            if self.thumbnail:
                found += [(THUMBNAIL, None), *_patches(whole, layout.down, layout.across)]
        else:
            found += _patches(whole, layout.down, layout.across)
        return [*found, (IMAGE_END, None)]

    def images(self, width: int, height: int) -> int:
        """Pictures that one image becomes: its tiles and the thumbnail, or itself."""
        layout = self.layout(width, height)
        return layout.columns * layout.rows + (layout.tiled and self.thumbnail)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Tokens across and down of the image as a whole: near its own size, within the bounds on tokens."""
        across, down = max(1, round(width / self.cell)), max(1, round(height / self.cell))
        area = self.cell**2
        if across * down > self.max_tokens:
            shrink = math.sqrt(height * width / (self.max_tokens * area))
            across = max(1, math.floor(width / shrink / self.cell))
            down = max(1, math.floor(height / shrink / self.cell))
        elif across * down < self.min_tokens:
            grow = math.sqrt(self.min_tokens * area / (height * width))
            across = math.ceil(width * grow / self.cell)
            down = math.ceil(height * grow / self.cell)
        return across, down

    def _large(self, width: int, height: int) -> bool:
        sides = [max(self.patch, round(side / self.cell) * self.cell) for side in (width, height)]
        return sides[0] * sides[1] > self.max_tokens * self.cell**2 * self.tolerance

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows whose shape is nearest; of two that are as near, the later if the image fills half."""
        tiles = range(1, self.max_tiles + 1)
        shapes = {(x, y) for x in tiles for y in tiles if self.min_tiles <= x * y <= self.max_tiles}
        nearest, best = math.inf, (1, 1)
        for columns, rows in sorted(shapes, key=_by_number):
            distance = abs(width / height - columns / rows)
            half_full = 2 * width * height > self.tile**2 * columns * rows
            if distance < nearest or (distance == nearest and half_full):
                nearest, best = distance, (columns, rows)
        return best


def _by_number(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def _markers(layout: Layout) -> list[str]:
    """The token before each tile.

    transformers up to 4.57, with which these checkpoints were trained, takes columns for rows when it numbers the
    tiles, and so does this: a page of two columns and three rows is numbered as one of three columns and two rows.
    """
    return [
        f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(layout.columns) for column in range(layout.rows)
    ]


def _patches(box: Box | None, rows: int, columns: int) -> list[Piece]:
    return [] if box is None else [(IMAGE, cell) for cell in grid(box, rows, columns)]
