"""Images of requests: from a data URI, or a URL of an allowed host, to a picture in RGB; or an HTTP 400.

Whatever a client sends ends here, in the API process, before the engine or vLLM's own processors see it. The
outcome for every kind of input stands in ``docs/images.md``. Needs the extra ``images``.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import contextlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm_factory.errors import RequestError, UnsupportedError, shown
from vllm_factory.io.limits import Limits, hosts_from_environment

if TYPE_CHECKING:
    from PIL import Image

    from vllm_factory.io.image_fetch import Fetcher

#: What decoding and fetching need.
REQUIRED = ("PIL", "httpcore")
#: Images of one API process that are decoded or fetched at once.
WORKERS = 4
_DATA_URI = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as the client sent it.

    Attributes:
        field: The field that holds it, as the client wrote it, e.g. ``"image[3]"``.
        text: The data URI or URL.
    """

    field: str
    text: str


class ImageLoader:
    """Loads the images of requests. One instance serves all threads of a process.

    Args:
        limits: Bounds on images.
        fetcher: What may be fetched; the operator's environment says when absent.

    Raises:
        UnsupportedError: The extra ``images`` is not installed, or the environment names no hosts where it
            should.
    """

    def __init__(self, limits: Limits, fetcher: Fetcher | None = None) -> None:
        missing = [name for name in REQUIRED if find_spec(name) is None]
        if missing:
            raise UnsupportedError(
                f"images need {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
                "installed: pip install 'vllm-factory[images]'"
            )
        self._limits = limits
        self._fetcher = fetcher or _default_fetcher(limits)
        self._decoders = DecoderPool(limits)
        self._threads = ThreadPoolExecutor(WORKERS, "vllm-factory-images")

    def check(self, sources: Sequence[ImageSource]) -> None:
        """What can be known without decoding or fetching: number, form, size and allowed hosts.

        Raises:
            RequestError: The message names the field.
        """
        if len(sources) > self._limits.max_images:
            raise RequestError(
                sources[0].field.partition("[")[0],
                f"{len(sources)} images; one request takes {self._limits.max_images}",
            )
        for source in sources:
            self._check(source)

    def load(self, sources: Sequence[ImageSource]) -> list[Image.Image]:
        """The pictures, in order, upright, as RGB.

        Raises:
            RequestError: The message names the field of the first that cannot be read.
        """
        self.check(sources)
        budget = _Budget(self._limits.max_total_pixels)
        deadline = time.monotonic() + self._limits.max_load_seconds
        loading = [(source, self._threads.submit(self._load, source, budget)) for source in sources]
        try:
            return [self._result(source, each, deadline) for source, each in loading]
        finally:
            for _, each in loading:
                each.cancel()

    def close(self) -> None:
        """End the helper processes."""
        self._threads.shutdown(cancel_futures=True)
        self._decoders.close()

    def _check(self, source: ImageSource) -> None:
        if source.text[:5].lower() == "data:":
            _check_data_uri(source, self._limits.max_image_bytes)
            return
        from vllm_factory.io.image_fetch import FetchError

        try:
            self._fetcher.check(source.text)
        except FetchError as error:
            raise RequestError(source.field, str(error)) from error

    def _result(self, source: ImageSource, loading: Future[Image.Image], deadline: float) -> Image.Image:
        try:
            return loading.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError as error:
            limit = self._limits.max_load_seconds
            raise RequestError(source.field, f"the request's images are not there after {limit} seconds") from error

    def _load(self, source: ImageSource, budget: _Budget) -> Image.Image:
        budget.check(source.field)
        image = self._decoders.decode(source.field, self._read(source))
        budget.take(source.field, image.width * image.height)
        return image

    def _read(self, source: ImageSource) -> bytes:
        if source.text[:5].lower() == "data:":
            return _data_of(source)
        from vllm_factory.io.image_fetch import FetchError

        try:
            return self._fetcher.fetch(source.text)
        except FetchError as error:
            raise RequestError(source.field, str(error)) from error


def _default_fetcher(limits: Limits) -> Fetcher:
    from vllm_factory.io.image_fetch import Fetcher

    return Fetcher(hosts_from_environment(), max_bytes=limits.max_image_bytes, seconds=limits.max_fetch_seconds)


def _check_data_uri(source: ImageSource, max_bytes: int) -> int:
    """Where the data of a data URI begins."""
    head = _DATA_URI.match(source.text[:1_000])
    if head is None:
        raise RequestError(source.field, f"{shown(source.text)}: expected data:image/...;base64,...")
    if head[2].lower().split(";")[-1] != "base64":
        raise RequestError(source.field, f"{shown(head[0])}: a data URI of an image is in base64")
    if (len(source.text) - head.end()) * 3 // 4 > max_bytes + 2:
        raise RequestError(source.field, f"the file has more than {max_bytes} bytes")
    return head.end()


def _data_of(source: ImageSource) -> bytes:
    start = _DATA_URI.match(source.text[:1_000])
    try:
        # ascii: another character would be an error of another kind.
        return base64.b64decode(source.text[start.end() if start else 0 :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RequestError(source.field, f"the data URI's base64 is damaged: {error}") from error


class _Budget:
    """Pixels that the images of one request may have together."""

    def __init__(self, pixels: int) -> None:
        self._most = self._left = pixels
        self._lock = threading.Lock()

    def check(self, field: str) -> None:
        """Refuse to begin another image when nothing is left."""
        if self._left < 0:
            raise RequestError(field, f"the request's images have more than {self._most} pixels together")

    def take(self, field: str, pixels: int) -> None:
        """Count an image that is here."""
        with self._lock:
            self._left -= pixels
        self.check(field)


class DecoderPool:
    """Helper processes that decode (see :mod:`vllm_factory.io.image_worker`), started when needed.

    Args:
        limits: Bounds on images.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._free: queue.SimpleQueue[_Decoder | None] = queue.SimpleQueue()
        for _ in range(WORKERS):
            self._free.put(None)
        atexit.register(self.close)

    def decode(self, field: str, data: bytes) -> Image.Image:
        """The picture in a file's bytes.

        Raises:
            RequestError: It cannot be read, breaks a limit, takes too long, or ends the decoder.
        """
        if not data:
            raise RequestError(field, "an empty file")
        decoder = self._free.get()
        try:
            if decoder is None or not decoder.alive:
                decoder = _Decoder(self._limits)
            return decoder.decode(field, data)
        finally:
            self._free.put(decoder)

    def close(self) -> None:
        """End the processes; later images start new ones."""
        atexit.unregister(self.close)
        for _ in range(WORKERS):
            with contextlib.suppress(queue.Empty):
                decoder = self._free.get_nowait()
                if decoder is not None:
                    decoder.end()
                self._free.put(None)


class _Decoder:
    """One helper process."""

    def __init__(self, limits: Limits) -> None:
        # By the file's path: the package's own imports would take seconds.
        worker = find_spec("vllm_factory.io.image_worker")
        assert worker is not None
        assert worker.origin is not None
        arguments = (limits.max_image_pixels, limits.max_image_aspect, limits.max_decode_seconds)
        self._seconds = limits.max_decode_seconds
        self._process = subprocess.Popen(
            [sys.executable, "-I", worker.origin, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    @property
    def alive(self) -> bool:
        """Whether it can take another image."""
        return self._process.poll() is None

    def decode(self, field: str, data: bytes) -> Image.Image:
        """One image; see :meth:`DecoderPool.decode`."""
        try:
            self._write(len(data).to_bytes(4, "little") + data)
            width, height = (int.from_bytes(self._read(4), "little") for _ in range(2))
            if width == 0:
                message = self._read(int.from_bytes(self._read(4), "little"))
                raise RequestError(field, message.decode("ascii"))
            pixels = self._read(3 * width * height)
        except (OSError, EOFError) as error:
            raise RequestError(field, self._cause_of_death()) from error
        image: Any = import_module("PIL.Image")
        picture: Image.Image = image.frombytes("RGB", (width, height), pixels)
        return picture

    def end(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.kill()
        self._process.wait()

    def _cause_of_death(self) -> str:
        status = self._process.wait()
        self.end()
        if status == -signal.SIGALRM:
            return f"it takes longer than {self._seconds} seconds to decode"
        return "it cannot be decoded"

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) != size:
            raise EOFError
        return data
