"""Images that strangers send: each is a picture as documented, or a refusal that names the field."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from image_files import LIMITS, PICTURES, REFUSED, encoded, uri
from vllm_factory.errors import RequestError, UnsupportedError
from vllm_factory.io.image_fetch import Fetcher, FetchError, is_public
from vllm_factory.io.images import ImageLoader, ImageSource
from vllm_factory.io.limits import Host, hosts_from_environment, parse_hosts


@pytest.fixture(scope="module")
def loader() -> Iterator[ImageLoader]:
    loaded = ImageLoader(LIMITS)
    yield loaded
    loaded.close()


def load(loader: ImageLoader, *texts: str) -> list[Image.Image]:
    return loader.load([ImageSource(f"image[{index}]", text) for index, text in enumerate(texts)])


@pytest.mark.parametrize(("make", "size", "colour"), PICTURES.values(), ids=PICTURES)
def test_pictures(
    make: Callable[[], bytes], size: tuple[int, int], colour: tuple[int, int, int], loader: ImageLoader
) -> None:
    (image,) = load(loader, uri(make()))
    assert (image.mode, image.size) == ("RGB", size)
    found = image.getpixel((0, 0))
    assert isinstance(found, tuple)
    assert all(abs(a - b) <= 2 for a, b in zip(found, colour, strict=True))


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
