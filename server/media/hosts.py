"""Downloads of images from allowed hosts.

Prevents server-side request forgery. A host name is resolved once, all its addresses are checked,
and the connection uses one of them, so that DNS rebinding has no effect. Redirects are subject to
the same checks.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from urllib.parse import urljoin, urlsplit

import httpcore

from server.media.decode import BadImage

MAX_URL = 8192
"""Maximum length in characters of a URL other than a `data:` URL."""
MAX_REDIRECTS = 3
MAX_FETCHES = 32
"""Maximum concurrent downloads per process."""


async def _addresses_of(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in infos]


def is_public(address: str) -> bool:
    """Return whether an IP address, and any IPv4 address embedded in it, is publicly routable."""
    try:
        found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.teredo is not None or found.scope_id is not None:
            return False
        inner = found.ipv4_mapped or found.sixtofour
        if inner is None and found in _TRANSLATED:
            inner = ipaddress.IPv4Address(found.packed[-4:])
        found = inner or found
    return found.is_global and not (
        found.is_multicast or found.is_reserved or found.is_unspecified or found.is_loopback
        or found.is_link_local or found.is_private
    )  # fmt: skip


_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""The NAT64 prefix, whose addresses embed an IPv4 address."""


class Hosts:
    """Fetches images over HTTP and HTTPS.

    Args:
        domains: allowed hosts; `*.example.com` allows all subdomains of example.com.
        max_bytes: maximum size of an image.
        seconds: timeout per image, including the wait for a free download slot.
        resolve: returns the IP addresses of a host, given the host and port.
        allows: returns whether connecting to an IP address is allowed.
    """

    def __init__(
        self,
        domains: Sequence[str],
        *,
        max_bytes: int,
        seconds: float,
        resolve: Callable[[str, int], Awaitable[list[str]]] = _addresses_of,
        allows: Callable[[str], bool] = is_public,
    ) -> None:
        self._domains = [domain.lower().rstrip(".") for domain in domains]
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._resolve = resolve
        self._allows = allows
        self._places = asyncio.Semaphore(MAX_FETCHES)

    async def fetch(self, url: str) -> bytes:
        """Return the bytes of the image at a URL.

        Raises:
            BadImage: the URL is invalid or not allowed, or the download failed, timed out or
                exceeded `max_bytes`.
        """
        try:
            async with asyncio.timeout(self._seconds), self._places:
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(url)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError as error:
            late = f"the image could not be fetched within {self._seconds:g} s"
            raise BadImage(late) from error
        except (
            httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError,
        ) as error:  # fmt: skip
            raise BadImage("the image could not be fetched") from error
        raise BadImage(f"the image is behind more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: str) -> bytes | str:
        """Return the content of a URL, or the target URL if it redirects."""
        host, port = self._checked(url)
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(self._allows, addresses)):
            raise BadImage("the host of the URL has an address that is not public")
        headers = [("Host", urlsplit(url).netloc), ("Accept", "image/*"), ("User-Agent", "swell")]
        backend = _Addresses(addresses)
        async with (
            httpcore.AsyncConnectionPool(network_backend=backend, max_connections=1) as pool,
            pool.stream("GET", url, headers=headers) as answer,
        ):
            fields = {name.lower(): value for name, value in answer.headers}
            if answer.status in (301, 302, 303, 307, 308) and b"location" in fields:
                location = urljoin(url, fields[b"location"].decode("latin-1"))
                if len(location) > MAX_URL or not location.startswith(("http://", "https://")):
                    raise BadImage("the image is redirected to a URL that is not http(s)")
                return location
            if answer.status != 200:
                raise BadImage(f"the image could not be fetched: status {answer.status}")
            content = bytearray()
            async for piece in answer.aiter_stream():
                content += piece
                if len(content) > self._max_bytes:
                    raise BadImage(f"the image has more than {self._max_bytes} bytes")
            return bytes(content)

    def _checked(self, url: str) -> tuple[str, int]:
        """Return the host and port of a URL; raise `BadImage` if the host is not allowed."""
        try:
            # URL parsers disagree on these characters, so a check could pass for another host.
            if not url.isascii() or any(each <= " " or each in "\\\x7f" for each in url):
                raise ValueError
            parts = urlsplit(url)
            host = (parts.hostname or "").rstrip(".")
            port = parts.port or (443 if parts.scheme == "https" else 80)
            if not host or "@" in parts.netloc:
                raise ValueError
        except ValueError as error:
            raise BadImage("the URL is not valid") from error
        for domain in self._domains:
            if host.endswith(domain[1:]) if domain.startswith("*.") else host == domain:
                return host, port
        raise BadImage("the host of the URL is not in --allowed-media-domains")


class _Addresses(httpcore.AsyncNetworkBackend):
    """Connects to the checked addresses only, whatever the requested host."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(dict.fromkeys(addresses))

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        for address in self._addresses:
            try:
                return await httpcore.AnyIOBackend().connect_tcp(address, port)
            except httpcore.NetworkError:
                continue
        raise httpcore.ConnectError("no address of the host accepts connections")
