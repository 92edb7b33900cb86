"""Fetching images from hosts that the operator allows, and from nowhere else.

A server that fetches what strangers name can be turned against its own network. So a host must be on the
operator's list; its name is resolved once, every address must be a public one, and the connection goes to the
checked address, not to the name again; each redirect is checked in the same way; time and bytes are bounded.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore

from vllm_factory.errors import shown
from vllm_factory.io.limits import HOSTS_VARIABLE, Host, canonical

#: Redirects that are followed, from allowed host to allowed host.
MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS: dict[bytes | str, bytes | str] = {
    "User-Agent": "vllm-factory",
    "Accept": "image/*",
    "Accept-Encoding": "identity",
}
#: Ranges that lead on to other addresses (translation and tunnels), which nobody has checked.
_INDIRECT = tuple(
    ipaddress.ip_network(network)
    for network in ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
)

Resolver = Callable[[str, int], Sequence[str]]
AddressCheck = Callable[[str], bool]


class FetchError(Exception):
    """The URL is refused or could not be fetched; the message says why."""


def is_public(address: str) -> bool:
    """Whether ``address`` is one of the public internet, and leads nowhere else."""
    found = ipaddress.ip_address(address.partition("%")[0])
    local = (
        found.is_private
        or found.is_loopback
        or found.is_link_local
        or found.is_multicast
        or found.is_reserved
        or found.is_unspecified
    )
    return found.is_global and not local and not any(found in network for network in _INDIRECT)


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, as the system finds them."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Fetcher:
    """Fetches URLs under the operator's policy. One instance serves all threads.

    Args:
        hosts: Where images may come from; none by default.
        max_bytes: Most bytes of one image.
        seconds: For one image, from the look-up of the name to the last byte, redirects included.
        resolver: Finds a name's addresses.
        acceptable: Says of an address whether a connection to it is allowed.
    """

    def __init__(
        self,
        hosts: Iterable[Host],
        *,
        max_bytes: int,
        seconds: float,
        resolver: Resolver = resolve,
        acceptable: AddressCheck = is_public,
    ) -> None:
        self._hosts = frozenset(hosts)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._resolver = resolver
        self._acceptable = acceptable
        # A look-up cannot be interrupted; it is left behind in a thread when it takes too long.
        self._lookups = concurrent.futures.ThreadPoolExecutor(8, "vllm-factory-dns")

    def check(self, url: str) -> SplitResult:
        """The parts of an allowed URL.

        Raises:
            FetchError: It is not allowed.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise FetchError(f"{shown(url)} is no URL: {error}") from error
        if parts.scheme not in _PORTS or not parts.hostname:
            raise FetchError(f"{shown(url)}: expected a data URI, or an http or https URL")
        if "@" in parts.netloc:
            raise FetchError("a URL may not hold a user or a password")
        if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
            raise FetchError(f"{shown(url)}: a URL is ASCII without spaces; encode what is not")
        own = _PORTS[parts.scheme]
        host = canonical(parts.hostname)
        allowed = {Host(host, port or own)} | ({Host(host)} if port in (None, own) else set())
        if not allowed & self._hosts:
            raise FetchError(
                f"images are not fetched from {shown(parts.netloc)}; send a data URI, "
                f"or let the operator allow the host ({HOSTS_VARIABLE})"
            )
        return parts

    def fetch(self, url: str) -> bytes:
        """The body behind ``url``.

        Raises:
            FetchError: It is not allowed, not there, too large or too slow.
        """
        deadline = _Deadline(self._seconds)
        parts = self.check(url)
        for _ in range(MAX_REDIRECTS + 1):
            found = self._get(parts, deadline)
            if isinstance(found, bytes):
                return found
            following = self.check(urljoin(parts.geturl(), found))
            if (parts.scheme, following.scheme) == ("https", "http"):
                raise FetchError("it redirects from https to http")
            parts = following
        raise FetchError(f"more than {MAX_REDIRECTS} redirects")

    def _get(self, parts: SplitResult, deadline: _Deadline) -> bytes | str:
        """The body, or where a redirect leads."""
        host = canonical(parts.hostname or "")
        addresses = self._addresses(host, parts.port or _PORTS[parts.scheme], deadline)
        backend = _PinnedBackend(addresses, deadline)
        url = parts._replace(fragment="").geturl()
        try:
            with (
                httpcore.ConnectionPool(ssl_context=_tls(), network_backend=backend) as pool,
                pool.stream("GET", url, headers=_HEADERS) as response,
            ):
                return self._read(response, deadline)
        except (httpcore.TimeoutException, TimeoutError) as error:
            raise FetchError(f"not fetched within {self._seconds:g} seconds") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError, ValueError) as error:
            raise FetchError(f"{shown(host)} could not be reached or answered badly") from error

    def _addresses(self, host: str, port: int, deadline: _Deadline) -> list[str]:
        lookup = self._lookups.submit(self._resolver, host, port)
        try:
            addresses = list(lookup.result(deadline.left()))
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            raise FetchError(f"not fetched within {self._seconds:g} seconds") from error
        except (OSError, UnicodeError) as error:
            raise FetchError(f"the name {shown(host)} has no address") from error
        # One bad address among good ones is a trick: all must be fit.
        if not addresses or not all(map(self._acceptable, addresses)):
            raise FetchError(f"{shown(host)} has an address that is not public")
        return addresses

    def _read(self, response: httpcore.Response, deadline: _Deadline) -> bytes | str:
        headers = {name.lower(): value for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in headers:
            return headers[b"location"].decode("latin-1")
        if response.status != 200:
            raise FetchError(f"the host answered with status {response.status}")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise FetchError("the host sent a compressed body although none was asked for")
        body = bytearray()
        for chunk in response.iter_stream():
            body += chunk
            if len(body) > self._max_bytes:
                raise FetchError(f"the file has more than {self._max_bytes} bytes")
            deadline.left()
        return bytes(body)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class _Deadline:
    """A point in time by which all must be done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left.

        Raises:
            TimeoutError: None are.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _PinnedBackend(httpcore.NetworkBackend):
    """Connects to addresses that were checked, whatever the name means by now."""

    def __init__(self, addresses: Sequence[str], deadline: _Deadline) -> None:
        self._addresses = addresses
        self._deadline = deadline
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """A connection to the first address that takes one."""
        failure: Exception = httpcore.ConnectError(f"no address of {host}")
        for address in self._addresses:
            try:
                stream = self._sockets.connect_tcp(address, port, self._deadline.left())
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
                continue
            return _BoundedStream(stream, self._deadline)
        raise failure

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        """Never: there is no URL for one."""
        raise httpcore.ConnectError("no Unix sockets")


class _BoundedStream(httpcore.NetworkStream):
    """A connection on which every operation ends at the deadline."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Up to ``max_bytes``."""
        return self._stream.read(max_bytes, self._deadline.left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """All of ``buffer``."""
        self._stream.write(buffer, self._deadline.left())

    def close(self) -> None:
        """Close it."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        """The same under TLS; the certificate must be the name's, not the address's."""
        secured = self._stream.start_tls(ssl_context, server_hostname, self._deadline.left())
        return _BoundedStream(secured, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        """What the connection below knows."""
        return self._stream.get_extra_info(info)
