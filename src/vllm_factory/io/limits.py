"""How much one request may ask for. Operators change the numbers by environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from vllm_factory.errors import UnsupportedError, shown

#: Hosts from which images may be fetched, separated by commas: ``host``, or ``host:port`` for another port.
HOSTS_VARIABLE = "VLLM_FACTORY_IMAGE_HOSTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request.

    Attributes:
        max_chars: Characters of all texts together (``VLLM_FACTORY_MAX_CHARS``).
        max_texts: Texts (``VLLM_FACTORY_MAX_TEXTS``).
        max_labels: Labels (``VLLM_FACTORY_MAX_LABELS``).
        max_candidates: Candidate labels to link to (``VLLM_FACTORY_MAX_CANDIDATES``).
        max_mentions: Mentions in all texts together (``VLLM_FACTORY_MAX_MENTIONS``).
        max_images: Images (``VLLM_FACTORY_MAX_IMAGES``).
        max_image_bytes: Bytes of one image's file (``VLLM_FACTORY_MAX_IMAGE_BYTES``).
        max_image_pixels: Pixels of one image (``VLLM_FACTORY_MAX_IMAGE_PIXELS``). A4 at 600 dpi has 35 million.
        max_total_pixels: Pixels of all images together (``VLLM_FACTORY_MAX_TOTAL_PIXELS``). A pixel is three
            bytes of the API process's memory.
        max_image_aspect: Longer side of an image over its shorter one (``VLLM_FACTORY_MAX_IMAGE_ASPECT``).
        max_decode_seconds: Seconds to decode one image (``VLLM_FACTORY_MAX_DECODE_SECONDS``).
        max_fetch_seconds: Seconds to fetch one image (``VLLM_FACTORY_MAX_FETCH_SECONDS``).
        max_load_seconds: Seconds for all images of a request (``VLLM_FACTORY_MAX_LOAD_SECONDS``). vLLM prepares
            a request on its event loop, so as long as this every other client of the API process may wait.
        max_similarities: Numbers in the similarity matrices of one response (``VLLM_FACTORY_MAX_SIMILARITIES``).
    """

    max_chars: int = 1_000_000
    max_texts: int = 1_024
    max_labels: int = 4_096
    max_candidates: int = 16_384
    max_mentions: int = 16_384
    max_similarities: int = 1_000_000
    max_images: int = 64
    max_image_bytes: int = 20_000_000
    max_image_pixels: int = 40_000_000
    max_total_pixels: int = 160_000_000
    max_image_aspect: int = 200
    max_decode_seconds: int = 10
    max_fetch_seconds: int = 5
    max_load_seconds: int = 20

    @classmethod
    def from_environment(cls) -> Limits:
        """The defaults, where no environment variable says otherwise.

        Raises:
            UnsupportedError: A variable is no positive integer.
        """
        given = {}
        for name in (field.name for field in fields(cls)):
            variable = f"VLLM_FACTORY_{name.upper()}"
            value = os.environ.get(variable)
            if value is None:
                continue
            if not value.isdecimal() or int(value) < 1:
                raise UnsupportedError(f"{variable}={shown(value)}: expected a positive whole number")
            given[name] = int(value)
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Host:
    """An allowed host and port; port ``None`` stands for the scheme's own."""

    name: str
    port: int | None = None


def parse_hosts(text: str) -> frozenset[Host]:
    """The hosts of a list separated by commas.

    Raises:
        UnsupportedError: An entry is no host.
    """
    return frozenset(_parse_host(entry.strip()) for entry in text.split(",") if entry.strip())


def _parse_host(entry: str) -> Host:
    try:
        parts = urlsplit(f"//{entry}")
        host = Host(canonical(parts.hostname or ""), parts.port)
    except ValueError as error:
        raise UnsupportedError(f"{HOSTS_VARIABLE}: {shown(entry)}: {error}") from error
    if not host.name or parts.path or parts.query or parts.fragment or "@" in parts.netloc or "*" in entry:
        raise UnsupportedError(
            f"{HOSTS_VARIABLE}: {shown(entry)}: expected host or host:port, without scheme, path or wildcard"
        )
    return host


def hosts_from_environment() -> frozenset[Host]:
    """The operator's list; empty when there is none.

    Raises:
        UnsupportedError: An entry is no host.
    """
    return parse_hosts(os.environ.get(HOSTS_VARIABLE, ""))


def canonical(host: str) -> str:
    """A host's name as it is compared."""
    return host.lower().removesuffix(".")
