"""HTTP/1.1 connections with limits on the memory and time that a client can use."""

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from server.access.tenants import EVERYBODY, SCOPE_KEY
from server.config import GuardConfig
from server.errors import ApiError, rate_limited, unavailable
from server.http.connection_table import Connection, ConnectionTable, TooManyConnections, client_of
from server.http.descriptors import room_for_connections
from server.http.disconnect import DISCONNECT, DisconnectNotifier
from server.http.request_meter import LimitExceeded, MeterLimits, Phase, RequestMeter
from server.limits import MAX_UNSENT, MAX_UNSENT_OF_ONE
from server.tenant_budget import TenantBudget

FREE_BYTES = 2**13
"""Uncounted bytes that a connection may buffer, small enough for every connection to have them."""

_TOO_MUCH_OF_ONE = rate_limited("Too many bytes of answers are unread: read them, then retry.")
_TOO_MUCH = unavailable("Too many bytes of answers wait to be read; try again.")


class UnsentBudget:
    """Bytes of responses held until their clients have read them, by tenant.

    They are counted from the response head if the length is known, else from when a part of a
    stream is sent, until the buffered bytes drop to what a transport may always hold.
    """

    def __init__(self) -> None:
        self._held = TenantBudget(MAX_UNSENT_OF_ONE, MAX_UNSENT)

    def counted(self, app: ASGIApp, drain: Callable[[], Awaitable[None]]) -> ASGIApp:
        """Wrap an application so that its responses on one connection are counted.

        Args:
            app: stores the tenant in the scope.
            drain: waits until the connection buffers little, or is closed.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            held = tenant = 0
            refused = False

            async def send_counted(message: Message) -> None:
                nonlocal held, tenant, refused
                if refused:
                    return
                begins = message["type"] == "http.response.start"
                if begins:
                    tenant = scope.get(SCOPE_KEY, EVERYBODY).id
                    lengths = [v for n, v in message.get("headers", ()) if n == b"content-length"]
                    size = int(lengths[0]) if lengths else 0
                    exceeded = size > FREE_BYTES and self._held.exceeded(tenant, size)
                    if exceeded:
                        refused = True
                        error = _TOO_MUCH_OF_ONE if exceeded == "own" else _TOO_MUCH
                        await error.send(scope["path"], send)
                        return
                else:
                    size = len(message.get("body", b""))
                if held or size <= FREE_BYTES:
                    await send(message)
                    return
                held = size
                self._held.take(tenant, size)
                await send(message)
                if not begins:  # part of a stream
                    await drain()
                    self._held.release(tenant, held)
                    held = 0

            try:
                await app(scope, receive, send_counted)
                if held:
                    await drain()
            finally:
                self._held.release(tenant, held)

        return answer


_NO_LINGER = struct.pack("ii", 1, 0)
_REST_SECONDS = 5.0
"""Timeout in seconds for the rest of a request that is already answered."""

_NO_PROXY = LimitExceeded(405, "This server is not a proxy.")

logger = logging.getLogger(__name__)


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with additional limits.

    Every byte of a request is counted (`RequestMeter`), every wait for a client has a timeout, and
    the number of connections is limited (`ConnectionTable`). A client that leaves more unread than
    the transport buffers is disconnected after a while: until then writes to it block, and its
    request keeps its place in an engine.
    """

    limits: MeterLimits
    receive_timeout: float
    send_timeout: float
    connection_table: ConnectionTable[Connection]
    unsent: UnsentBudget

    _address: str | None = None
    _answering: RequestResponseCycle | None = None
    """The request being answered; `cycle` is the newest one, which may be queued behind it."""
    _lingers = False
    """Whether everything is answered, and further input from the client is dropped."""
    _wait_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(
        self, *args: Any, on_made: Callable[[], None] = lambda: None, **options: Any
    ) -> None:
        """`on_made` is called when the connection is made, before it is registered."""
        super().__init__(*args, **options)
        self._on_made = on_made
        self._loaded_app: Any = self.app
        self._meter = RequestMeter(self.limits)
        self._disconnect = DisconnectNotifier()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.write = transport.write
        counted: Any = self.unsent.counted(self._loaded_app, self.flow.drain)
        self.app = counted
        transport.set_write_buffer_limits(FREE_BYTES)
        self._on_made()
        address = client_of(self.client[0] if self.client else "")
        try:
            victim = self.connection_table.open(self, address)
        except TooManyConnections:
            self._refuse(503, "Too many connections.")
            return
        self._address = address
        self._wait(self.receive_timeout)
        if victim is not None:
            logger.info("closed an idle connection to accept a new one (%s)", self.client)
            victim.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self.connection_table.close(self, self._address)
            self._address = None
        self._stop_waiting()
        self._cancel_stall_timer()
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._disconnect.notify()
        self._stop_keep_alive()

    # -- receiving -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        try:
            if self._lingers:
                self._meter.drop(len(data))
                return
            self._parse(data)
            self._meter.read(len(data))
        except httptools.HttpParserError as error:
            excess = error.__context__  # the parser wraps what its callbacks raise
            if isinstance(excess, LimitExceeded):
                self._refuse(excess.status, excess.reason)
            else:
                self._refuse(400, "Invalid HTTP request received.")
        except LimitExceeded as excess:
            self._refuse(excess.status, excess.reason)

    def _parse(self, data: bytes) -> None:
        """Feed `data` to the parser, ignoring requests for a protocol upgrade.

        After the head of such a request the parser treats all input as the other protocol, and this
        cannot be disabled. So the request is parsed again from its head, without the upgrade
        header.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                lines = [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
                version = self.parser.get_http_version().encode()
                request = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
                head = b"\r\n".join([request, *lines, b"", b""])
                data = head + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def on_message_begin(self) -> None:
        self._meter.begin()
        self._stop_keep_alive()
        if self._wait_timer is None:
            self._wait(self.receive_timeout)
        super().on_message_begin()
        scope: Any = self.scope
        scope[DISCONNECT] = self._disconnect

    def on_url(self, url: bytes) -> None:
        self._meter.field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._meter.field(len(name) + len(value) + 4):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise _NO_PROXY
            return  # parsed again
        self._stop_waiting()
        self._meter.head_ends(len(self.pipeline))
        waits = self.cycle is not None and not self.cycle.response_complete
        super().on_headers_complete()
        self.cycle.transport = self  # type: ignore[assignment]  # so that `close` below is called
        if not waits:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._meter.body(len(body))
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._meter.chunk()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._meter.end()
        super().on_message_complete()
        if not self.cycle.response_complete:
            if self._address is not None:
                self.connection_table.busy(self, self._address)
        elif not self.transport.is_closing():
            self._stop_waiting()
            self._keep_alive()

    def on_response_complete(self) -> None:
        if self._lingers:
            return
        pipelined = bool(self.pipeline)
        if pipelined and not self.transport.is_closing():
            self._answering = self.pipeline[-1][0]  # the next one, which uvicorn starts now
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit_closing_time()
        elif not pipelined:
            if self._address is not None:
                self.connection_table.waiting(self, self._address)
            if self._meter.answered():
                self._wait(min(_REST_SECONDS, self.receive_timeout))
            if self._meter.phase is not Phase.IDLE:
                self._stop_keep_alive()

    def _stop_keep_alive(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _keep_alive(self) -> None:
        self._stop_keep_alive()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _wait(self, seconds: float) -> None:
        """Start the timeout for the client to send a head or the rest of a request."""
        self._stop_waiting()
        self._wait_timer = self.loop.call_later(seconds, self._is_late)

    def _stop_waiting(self) -> None:
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None

    def _is_late(self) -> None:
        self._wait_timer = None
        if self._meter.phase is Phase.HEAD and not self._lingers:
            self._refuse(408, "The head of the request took too long.")
        else:
            self.transport.close()
            self._limit_closing_time()

    def _refuse(self, status: int, reason: str) -> None:
        """Answer input that cannot be parsed further, unless already answered, and close."""
        self._stop_waiting()
        if self.is_closing():
            self.transport.close()
            return
        logger.info("%s (%s)", reason, self.client)
        if self._takes_answer():
            kind = "server_error" if status == 503 else "invalid_request_error"
            body = ApiError(status, reason, kind=kind).body()
            again = b"retry-after: 1\r\n" if status == 503 else b""
            self.transport.write(
                STATUS_LINE[status] + b"content-type: application/json\r\n%s"
                b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (again, len(body), body)
            )
            self.close()
        else:
            self.transport.close()
            self._limit_closing_time()

    def _takes_answer(self) -> bool:
        """Return whether the client would match the next response to its current request.

        If the application is still reading that request, it is notified of a disconnect.
        """
        cycle, in_body = self.cycle, self._meter.phase is Phase.BODY
        if cycle is None or cycle.response_complete:
            return cycle is None or not in_body
        if not in_body or cycle is not self._answering or cycle.response_started:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return True

    # -- sending ---------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """Return whether no further requests are answered."""
        return self._lingers or self.transport.is_closing()

    def close(self) -> None:
        """Close the connection after a response.

        Closing while the client still sends would make the kernel reset the connection, and the
        client might never see the response. So remaining input is read and dropped first, up to a
        limit.
        """
        if self._meter.phase is Phase.IDLE or self.is_closing():
            self.transport.close()
            self._limit_closing_time()
            return
        self._lingers = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop_keep_alive()
        self.flow.resume_reading()
        if self._address is not None:
            self.connection_table.waiting(self, self._address)
        self._wait(min(_REST_SECONDS, self.receive_timeout))

    def shutdown(self) -> None:
        """Close the connection, after the current response if there is one."""
        if self.cycle is None or self.cycle.response_complete:
            self.close()
        else:
            self.cycle.keep_alive = False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_buffer()

    def resume_writing(self) -> None:
        self._cancel_stall_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit_closing_time()

    def _limit_closing_time(self) -> None:
        """Limit the time that a closing transport takes to send its buffer."""
        if self.transport.get_write_buffer_size():
            self._watch_buffer()

    def _watch_buffer(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.send_timeout, self._stalled)

    def _stalled(self) -> None:
        logger.info("disconnected a client that does not read its answers (%s)", self.client)
        self.abort()

    def abort(self) -> None:
        """Close the connection immediately and drop unsent data."""
        self._cancel_stall_timer()
        # With a zero linger time the kernel drops its buffer too and resets the connection.
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def limited_protocol(
    guards: GuardConfig, changed: Callable[[int], None] = lambda _: None
) -> type[LimitedHttpProtocol]:
    """Return the protocol class with the configured limits and its connection table.

    `changed` is called with each new number of connections.
    """

    class Configured(LimitedHttpProtocol):
        limits = MeterLimits(guards.max_header_bytes, guards.max_body_bytes)
        receive_timeout = guards.receive_timeout
        send_timeout = guards.send_timeout
        unsent = UnsentBudget()
        connection_table: ConnectionTable[Connection] = ConnectionTable(
            room_for_connections(guards.max_connections), changed
        )

    return Configured
