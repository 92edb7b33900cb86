"""Images that strangers send: each is a picture as documented, or a refusal that names the field."""

from __future__ import annotations

import base64
import io
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PIL import Image

from vllm_factory.errors import RequestError, UnsupportedError
from vllm_factory.io.image_fetch import Fetcher, FetchError, is_public
from vllm_factory.io.images import ImageLoader, ImageSource
from vllm_factory.io.limits import Host, Limits, hosts_from_environment, parse_hosts

LIMITS = Limits(max_image_bytes=300_000, max_image_pixels=400_000, max_total_pixels=500_000, max_decode_seconds=10)


@pytest.fixture(scope="module")
def loader() -> Iterator[ImageLoader]:
    loaded = ImageLoader(LIMITS)
    yield loaded
    loaded.close()


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def load(loader: ImageLoader, *texts: str) -> list[Image.Image]:
    return loader.load([ImageSource(f"image[{index}]", text) for index, text in enumerate(texts)])


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


@pytest.mark.parametrize(("make", "size", "colour"), PICTURES.values(), ids=PICTURES)
def test_pictures(
    make: Callable[[], bytes], size: tuple[int, int], colour: tuple[int, int, int], loader: ImageLoader
) -> None:
    (image,) = load(loader, uri(make()))
    assert (image.mode, image.size) == ("RGB", size)
    found = image.getpixel((0, 0))
    assert isinstance(found, tuple)
    assert all(abs(a - b) <= 2 for a, b in zip(found, colour, strict=True))


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


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_field_and_the_next_one_is_read(text: str, message: str, loader: ImageLoader) -> None:
    good = uri(encoded(Image.new("RGB", (3, 2))))
    with pytest.raises(RequestError) as caught:
        load(loader, good, text)
    assert str(caught.value).startswith("image[1]: ")
    assert message in str(caught.value)
    assert load(loader, good)[0].size == (3, 2)


def test_all_images_of_a_request_share_a_bound(loader: ImageLoader) -> None:
    large = uri(encoded(Image.new("L", (600, 600))))
    with pytest.raises(RequestError, match="more than 500000 pixels together"):
        load(loader, large, large)
    with pytest.raises(RequestError, match="65 images; one request takes 64"):
        load(loader, *[large] * 65)


class _Site(BaseHTTPRequestHandler):
    """A picture, a large body, and redirects."""

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        places = {
            "/away": "http://elsewhere.test/a.png",
            "/round": f"http://pictures.test:{port}/round",
            "/inside": "http://10.0.0.1/",
            "/again": f"http://pictures.test:{port}/a.png",
        }
        if self.path in places:
            self.send_response(302)
            self.send_header("Location", places[self.path])
            self.end_headers()
            return
        body = b"x" * 200_000 if self.path == "/large" else encoded(Image.new("RGB", (6, 5)))
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


def fetcher(port: int, acceptable: Callable[[str], bool], addresses: list[str] | None = None) -> Fetcher:
    return Fetcher(
        [Host("pictures.test", port), Host("elsewhere.test")] if port else [],
        max_bytes=100_000,
        seconds=5,
        resolver=lambda host, _: addresses or (["127.0.0.1"] if host == "pictures.test" else ["10.0.0.1"]),
        acceptable=acceptable,
    )


def here(address: str) -> bool:
    """For these tests alone, this machine counts as public."""
    return address == "127.0.0.1" or is_public(address)


def test_an_allowed_host_is_fetched(site: int) -> None:
    loader = ImageLoader(LIMITS, fetcher(site, here))
    for path in ("a.png", "again"):
        assert load(loader, f"http://pictures.test:{site}/{path}")[0].size == (6, 5)
    loader.close()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "the host answered with status 404"),
        ("large", "the file has more than 100000 bytes"),
        ("away", "has an address that is not public"),
        ("round", "more than 3 redirects"),
        ("inside", "images are not fetched from '10.0.0.1'"),
    ],
)
def test_what_is_not_fetched(path: str, message: str, site: int) -> None:
    with pytest.raises(FetchError, match=message):
        fetcher(site, here).fetch(f"http://pictures.test:{site}/{path}")


def test_private_addresses_are_refused_whatever_the_name(site: int) -> None:
    for addresses in (["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], []):
        with pytest.raises(FetchError, match="not public"):
            fetcher(site, is_public, addresses or ["169.254.169.254"]).fetch(f"http://pictures.test:{site}/a.png")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1%eth0", "fc00::1", "ff02::1"),
        *("::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1", "2001::1", "::8.8.8.8"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_addresses_that_are() -> None:
    assert is_public("8.8.8.8")
    assert is_public("2606:4700::1111")


def test_hosts_are_the_operator_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FACTORY_IMAGE_HOSTS", "Example.com., files.example.com:8443")
    assert hosts_from_environment() == {Host("example.com"), Host("files.example.com", 8443)}
    for entry in ("http://a", "a/b", "*.a", "a:b", "u@a"):
        with pytest.raises(UnsupportedError, match="VLLM_FACTORY_IMAGE_HOSTS"):
            parse_hosts(entry)
