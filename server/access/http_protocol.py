"""HTTP/1.1 connections with limits on what a client may make the server hold, and for how long."""

import asyncio
import logging
import socket
import struct

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.config import GuardConfig

_NO_LINGER = struct.pack("ii", 1, 0)

logger = logging.getLogger(__name__)


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with three limits that it does not have.

    The head of a request has a largest size and a time in which it has to be complete, and a
    client that leaves more unread than the transport buffers is cut off after a while: until then
    whoever writes to it waits, and its request holds its place in an engine.
    """

    max_header_bytes: int
    receive_timeout: float
    send_timeout: float

    _in_head = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.receive_timeout, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_stall_timer()
        super().connection_lost(exc)

    # -- receiving -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_grew(len(data))

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._cancel_head_timer()
        super().on_headers_complete()

    def _head_grew(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.max_header_bytes:
            self._refuse(431, "The head of the request is too large.")
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.receive_timeout, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(408, "The head of the request took too long.")
        else:
            self.transport.close()

    def _refuse(self, status: int, reason: str) -> None:
        """Answer a request that never reached the application, and close."""
        self._cancel_head_timer()
        if self.transport.is_closing():
            return
        logger.info("%s (%s)", reason, self.client)
        if self.cycle is None or self.cycle.response_complete:
            body = reason.encode()
            self.transport.write(
                STATUS_LINE[status] + b"content-type: text/plain; charset=utf-8\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)
            )
        self.transport.close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # -- sending ---------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_buffer()

    def resume_writing(self) -> None:
        self._cancel_stall_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self._watch_buffer()

    def _watch_buffer(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.send_timeout, self._stalled)

    def _stalled(self) -> None:
        self._stall_timer = None
        logger.info("a client that does not read is cut off (%s)", self.client)
        # Without lingering the kernel too drops what it has buffered, and the client is told.
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def limited_protocol(limits: GuardConfig) -> type[LimitedHttpProtocol]:
    """Return the protocol class with the configured limits."""

    class Configured(LimitedHttpProtocol):
        max_header_bytes = limits.max_header_bytes
        receive_timeout = limits.receive_timeout
        send_timeout = limits.send_timeout

    return Configured
