"""Images that strangers send, as files and data URIs, and what becomes of them: see docs/images.md."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image

from vllm_factory.io.limits import Limits

LIMITS = Limits(max_image_bytes=300_000, max_image_pixels=400_000, max_total_pixels=500_000, max_decode_seconds=10)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.new("RGB", (20, 10), "red"), "JPEG", exif=exif)


def palette() -> bytes:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    return encoded(image, transparency=1)


def animated() -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


PICTURES: dict[str, tuple[Callable[[], bytes], tuple[int, int], tuple[int, int, int]]] = {
    "1x1": (lambda: encoded(Image.new("RGB", (1, 1), "red")), (1, 1), (255, 0, 0)),
    "332x27": (lambda: encoded(Image.new("RGB", (332, 27), "red")), (332, 27), (255, 0, 0)),
    "CMYK": (lambda: encoded(Image.new("CMYK", (8, 8)), "JPEG"), (8, 8), (255, 255, 255)),
    "16 bits of grey": (lambda: encoded(Image.new("I;16", (5, 5), 65535)), (5, 5), (255, 255, 255)),
    "16 bits, half": (lambda: encoded(Image.new("I;16", (5, 5), 128 * 257)), (5, 5), (128, 128, 128)),
    "palette with transparency": (palette, (4, 4), (255, 255, 255)),
    "transparent": (lambda: encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 0))), (4, 4), (255, 255, 255)),
    "turned upright": (rotated, (10, 20), (254, 0, 0)),
    "the first frame": (animated, (8, 8), (255, 0, 0)),
}


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is huge, with a few bytes of data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


WHOLE = encoded(Image.effect_noise((64, 64), 50), "JPEG")
REFUSED: dict[str, tuple[str, str]] = {
    "truncated": (uri(WHOLE[: len(WHOLE) // 2]), "the JPEG is truncated or damaged"),
    "header only": (uri(WHOLE[:10]), "not an image, or damaged"),
    "1x20000": (uri(encoded(Image.new("L", (1, 20000)))), "one side is more than 200 times the other"),
    "too many pixels": (uri(encoded(Image.new("L", (700, 700)))), "700x700 pixels are more than 400000"),
    "decompression bomb": (uri(bomb(60000, 60000)), "60000x60000 pixels are more than 400000"),
    "short data": (uri(bomb(300, 300)), "truncated or damaged"),
    "SVG": (uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "not an image, or damaged"),
    "HTML": (uri(b"<html></html>"), "not an image, or damaged"),
    "empty": (uri(b""), "an empty file"),
    "TIFF": (uri(encoded(Image.new("L", (8, 8)), "TIFF")), "not an image, or damaged; formats that are read"),
    "not base64": ("data:image/png,abc", "a data URI of an image is in base64"),
    "damaged base64": ("data:image/png;base64,a*b=", "the data URI's base64 is damaged"),
    "no comma": ("data:image/png;base64", "expected data:image/...;base64,..."),
    "too many bytes": (uri(b"x" * 300_100), "the file has more than 300000 bytes"),
    "a file": ("file:///etc/passwd", "expected a data URI, or an http or https URL"),
    "a path": ("/etc/passwd", "expected a data URI, or an http or https URL"),
    "nothing": ("", "expected a data URI, or an http or https URL"),
    "a host": ("http://example.com/a.png", "images are not fetched from 'example.com'; send a data URI"),
    "an address": ("http://127.0.0.1/a.png", "images are not fetched from '127.0.0.1'"),
    "a password": ("http://a:b@example.com/", "a URL may not hold a user or a password"),
    "a bad port": ("http://example.com:99999/", "is no URL"),
}
