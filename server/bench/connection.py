"""Low-overhead HTTP/1.1 client for load generation: raw transports and a C parser."""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

OnBody = Callable[[bytes, float], None]
"""Receives a piece of a body and the monotonic time of its arrival."""


class BadAnswer(Exception):
    """The response is not valid HTTP."""


@dataclass
class Answer:
    """A server's response."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    """Empty if the caller received the body in pieces."""
    ended: float = 0.0
    """Monotonic time of its last byte."""


class _Connection(asyncio.Protocol):
    """A connection, which handles one exchange at a time."""

    _transport: asyncio.Transport
    _ended: asyncio.Future[None] | None = None
    """Set when the response is complete; None between exchanges."""

    def __init__(self) -> None:
        self.reusable = False
        """Whether the connection can be reused after the last exchange."""
        self.silent = True
        """Whether nothing of the current response has arrived yet."""
        self._parser = httptools.HttpResponseParser(self)
        self._has_length = False
        """Whether the response declares its length; otherwise it ends with the connection."""

    async def exchange(self, request: bytes, on_body: OnBody | None) -> Answer:
        """Send a request and return the response; see `HttpClient.request`."""
        self.reusable, self.silent, self._has_length = False, True, False
        if self._transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        self._answer, self._on_body = Answer(), on_body
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        finally:
            self._ended = None
        return self._answer

    def close(self) -> None:
        """Close the connection immediately."""
        self._transport.abort()

    # -- called by the event loop ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._ended is None:
            self.close()  # unsolicited data
            return
        self._answer.ended = time.monotonic()
        self.silent = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(BadAnswer(str(error)))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._ended is None:
            return
        if error is None and self._answer.status and not self._has_length:
            self._end()
        else:
            self._end(ConnectionResetError("the server closed the connection"))

    # -- called by the parser --------------------------------------------------------------------

    def on_header(self, name: bytes, _value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None and self._answer.status == 200:
            self._on_body(body, self._answer.ended)
        else:
            self._answer.body += body

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self._end()

    def _end(self, error: Exception | None = None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


class HttpClient:
    """Sends requests to a single server, without redirects or proxies.

    Args:
        url: base address, `http://` or `https://`; its path is prepended to those of requests.

    Raises:
        ValueError: `url` is not an HTTP address.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, *, keep_alive: bool = True
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url!r} is not an http:// or https:// address")
        self.url = url
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._keep_alive = keep_alive
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if not keep_alive:
            lines.append("Connection: close")
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header must not hold a line break")
        self._lines = "\r\n".join(lines)
        self._idle: list[_Connection] = []

    async def request(
        self, method: str, path: str, body: bytes = b"", *, on_body: OnBody | None = None
    ) -> Answer:
        """Send a request and return the complete response.

        If a reused connection turns out to be closed, the request is silently resent once on a new
        one: the server was free to close it.

        Args:
            on_body: called with each piece of a body of status 200, which is then not stored.

        Raises:
            OSError: connecting failed, or the connection was lost.
            BadAnswer: the response cannot be parsed.
        """
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._lines}\r\n"
        request = b"%bContent-Length: %d\r\n\r\n%b" % (head.encode("latin-1"), len(body), body)
        if self._idle:
            kept = self._idle.pop()
            try:
                return await self._exchange(kept, request, on_body)
            except ConnectionError:
                if not kept.silent:
                    raise
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._host, self._port, ssl=self._tls
        )
        return await self._exchange(connection, request, on_body)

    async def _exchange(
        self, connection: _Connection, request: bytes, on_body: OnBody | None
    ) -> Answer:
        try:
            answer = await connection.exchange(request, on_body)
        except BaseException:
            connection.close()
            raise
        if self._keep_alive and connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
