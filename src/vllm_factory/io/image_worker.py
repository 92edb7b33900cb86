"""Decoding one image after the other in a process of its own.

A picture from a stranger can take minutes (a JPEG of thousands of scans), gigabytes, or the process with it (a
fault in a codec). Here that costs this process, which is small and soon replaced, and one request an HTTP 400.
Run by path, with the standard library and Pillow only, so that it starts at once.

Protocol, little endian, over standard input and output. In: length (4 bytes), the file's bytes. Out: width and
height (4 bytes each) and ``3 * width * height`` bytes of RGB; or two zeros, a length (4 bytes) and a message.
"""

from __future__ import annotations

import io
import resource
import signal
import struct
import sys
import warnings
from typing import BinaryIO

from PIL import Image, ImageOps

#: Formats that are read; each is common for pages and has a codec that is kept well.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
SIZE = struct.Struct("<II")
LENGTH = struct.Struct("<I")
#: Memory beside the picture: the interpreter, Pillow's libraries, and a codec's own.
_BASE_MEMORY = 1 << 30
#: Copies of a picture that decoding, turning and converting hold at once, at four bytes a pixel.
_BYTES_PER_PIXEL = 24


class RefusedError(Exception):
    """The image is not read; the message says why."""


def decode(data: bytes, max_pixels: int, max_aspect: int) -> Image.Image:
    """The picture as RGB, upright.

    Raises:
        RefusedError: It is no image of an accepted format, is damaged, or breaks a limit.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # whatever a parser raises on the bytes of a stranger
        raise RefusedError(f"not an image, or damaged; formats that are read: {', '.join(FORMATS)}") from error
    # The header tells the size: nothing has been unpacked so far.
    check_size(image.width, image.height, max_pixels, max_aspect)
    try:
        image.load()
        # A GIF's frame may be larger than its header says.
        check_size(image.width, image.height, max_pixels, max_aspect)
        return to_rgb(ImageOps.exif_transpose(image))
    except RefusedError:
        raise
    except MemoryError as error:
        raise RefusedError("it needs too much memory to be decoded") from error
    except Exception as error:  # truncated or damaged in one of a hundred ways
        raise RefusedError(f"the {image.format} is truncated or damaged") from error


def check_size(width: int, height: int, max_pixels: int, max_aspect: int) -> None:
    """Refuse what breaks a limit, from the sizes alone.

    Raises:
        RefusedError: It does.
    """
    if width < 1 or height < 1:
        raise RefusedError(f"{width}x{height} pixels: there is nothing in it")
    if width * height > max_pixels:
        raise RefusedError(f"{width}x{height} pixels are more than {max_pixels}")
    if max(width, height) > max_aspect * min(width, height):
        raise RefusedError(f"{width}x{height} pixels: one side is more than {max_aspect} times the other")


def to_rgb(image: Image.Image) -> Image.Image:
    """``image`` in eight bits a channel, on white where it is transparent."""
    if image.mode.startswith("I"):
        # Sixteen bits of grey. Pillow's own conversion would cut everything above 255 to white.
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
        image.info.pop("transparency", None)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def serve(source: BinaryIO, sink: BinaryIO, max_pixels: int, max_aspect: int, seconds: float) -> None:
    """Answer until the input ends. The kernel ends the process when one image takes longer than ``seconds``."""
    while len(header := source.read(LENGTH.size)) == LENGTH.size:
        data = source.read(LENGTH.unpack(header)[0])
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            image = decode(data, max_pixels, max_aspect)
            answer = SIZE.pack(*image.size) + image.tobytes()
        except RefusedError as refused:
            message = str(refused).encode("ascii", "replace")
            answer = SIZE.pack(0, 0) + LENGTH.pack(len(message)) + message
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(answer)
        sink.flush()


def main() -> None:
    """Arguments: most pixels, greatest aspect ratio, seconds an image."""
    max_pixels, max_aspect, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even inside a codec
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server, which closes our input
    memory = _BASE_MEMORY + _BYTES_PER_PIXEL * max_pixels
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    warnings.simplefilter("ignore")  # our limits stand in for Pillow's
    Image.MAX_IMAGE_PIXELS = None
    serve(sys.stdin.buffer, sys.stdout.buffer, max_pixels, max_aspect, seconds)


if __name__ == "__main__":
    main()
