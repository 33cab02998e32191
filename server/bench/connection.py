"""HTTP/1.1 connections for load: raw transports, a C parser, little work per byte."""

import asyncio
import ssl
import time
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools


class AnswerSink(Protocol):
    """Takes an answer while it arrives."""

    def begin(self, status: int) -> None:
        """The head of the answer is there."""
        ...

    def data(self, body: bytes, now: float) -> None:
        """A part of the body arrived at `now` (monotonic seconds)."""
        ...


class BadAnswer(Exception):
    """What came is not HTTP."""


class _Connection(asyncio.Protocol):
    """One connection, which carries one exchange at a time."""

    def __init__(self) -> None:
        self.reusable = False
        """Whether the last exchange left it ready for another."""
        self.silent = True
        """Whether nothing of the current answer has arrived yet."""
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sink: AnswerSink | None = None
        self._ended: asyncio.Future[None] | None = None
        self._now = 0.0
        self._ends_with_connection = True

    async def exchange(self, request: bytes, sink: AnswerSink) -> None:
        """Send a request and wait for the end of its answer.

        Raises:
            ConnectionError: the connection was lost before.
            BadAnswer: the answer cannot be parsed.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        self.reusable, self.silent, self._ends_with_connection = False, True, True
        self._sink = sink
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        finally:
            self._sink = self._ended = None

    def close(self) -> None:
        """Close it, whatever it is doing."""
        if self._transport is not None:
            self._transport.abort()

    # -- called by the event loop ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        self.silent = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BadAnswer(str(error)))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if error is None and not self.silent and self._ends_with_connection:
            self._succeed()
        else:
            self._fail(ConnectionResetError("the server closed the connection"))

    # -- called by the parser --------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        if self._sink is not None:
            self._sink.begin(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.data(body, self._now)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self._succeed()

    def _succeed(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


class HttpClient:
    """Sends requests to one server and nowhere else: no redirects, no proxies.

    Args:
        url: base address, `http://` or `https://`; a path in it is put before those of requests.
        headers: sent with every request.
        keep_alive: reuse connections.

    Raises:
        ValueError: `url` is no HTTP address.
    """

    def __init__(
        self, url: str, headers: dict[str, str] | None = None, *, keep_alive: bool = True
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

    async def request(self, method: str, path: str, body: bytes, sink: AnswerSink) -> None:
        """Send a request and feed its answer to `sink` until it has ended.

        A kept connection that turns out to be closed already is replaced once, silently: the
        server was free to close it.

        Raises:
            OSError: there is no connection, or it was lost.
            BadAnswer: the answer cannot be parsed.
        """
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._lines}\r\nContent-Length: "
        request = b"".join((head.encode("latin-1"), str(len(body)).encode(), b"\r\n\r\n", body))
        kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                await self._exchange(kept, request, sink)
                return
            except ConnectionError:
                if not kept.silent:
                    raise
        await self._exchange(await self._connect(), request, sink)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._tls
        )
        return connection

    async def _exchange(self, connection: _Connection, request: bytes, sink: AnswerSink) -> None:
        try:
            await connection.exchange(request, sink)
        except BaseException:
            connection.close()
            raise
        if self._keep_alive and connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
