"""A request whose body is read subject to limits, and its response, possibly a stream."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import NamedTuple, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.access.admission import Reservation
from server.access.tenants import EVERYBODY, SCOPE_KEY, Tenant
from server.errors import ApiError, invalid, timed_out, unavailable
from server.http.body_budget import BodyBudget, NoRoomForBody
from server.http.disconnect import DISCONNECT, DisconnectNotifier

_RANK = re.compile(rb"[0-9]{1,6}")
_JSON = (b"content-type", b"application/json")
_EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

COMMENT = b": keep-alive\n\n"
"""An SSE comment, which clients ignore."""

HEADERS_WITHIN = 1.0
"""Seconds of silence after which a stream's headers are sent before its first event."""

_PIECE_BYTES = 1 << 16
"""Bytes per part of a response that is generated while it is sent."""

_Header = tuple[bytes, bytes]


class BodyLimits(NamedTuple):
    """Limits on the size of a body and the time to send it."""

    max_bytes: int
    seconds: float
    budget: BodyBudget


class ClientDisconnected(Exception):
    """The client disconnected and will not read a response."""


class Call(Request):
    """One request and its response.

    While it is entered (`with call:`), a disconnect of the client ends the block with
    `ClientDisconnected`.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: BodyLimits) -> None:
        super().__init__(scope, receive)
        self.path: str = scope["path"]
        self.limits = limits
        self.arrived = time.monotonic()
        self.status: int | None = None
        """Status of the response once it has started."""
        self._sent_at = 0.0
        """Time of the last part of an event stream, in monotonic seconds."""
        self._timer: asyncio.TimerHandle | None = None
        self._keep_alive_task: asyncio.Task[None] | None = None
        """Runs `send_keep_alive`; the next events wait for it."""
        self._owner: asyncio.Task[object] | None = None
        """The task that entered the call, cancelled when the client disconnects."""
        self._disconnect: DisconnectNotifier | None = scope.get(DISCONNECT)
        self._watch: asyncio.Task[None] | None = None
        """Waits for the disconnect if the server has no `DisconnectNotifier`."""
        self._hung_up = False
        self.has_client = True
        """Whether a client reads the response as it is generated."""
        self.weight_version: Callable[[], str] | None = None
        """Returns the version of the generating weights, called when the response starts."""
        self.content = b""
        """The body, once read."""
        self.key: Tenant = scope.get(SCOPE_KEY, EVERYBODY)
        """Tenant of the request's API key."""
        self.tenant = self.key
        self.reservation: Reservation | None = None
        """Queue reservation, released when the call ends."""
        self.on_release: list[Callable[[], None]] = []
        """Functions that release other resources of the call, called when it ends."""
        self._counted_bytes = 0
        """Bytes of the body that stay counted until the call ends."""
        self._answer = send
        self._content_type = b"application/json"
        self._pinned_rank: bytes | None = None
        self._declared = 0
        """Body size declared in the headers; 0 if there is none."""
        self.request_id = ""
        for name, value in scope["headers"]:
            if name == b"content-type":
                self._content_type = value
            elif name == b"x-request-id":  # set on every request (`RequestIdMiddleware`)
                self.request_id = value.decode()
            elif name == b"x-data-parallel-rank":
                self._pinned_rank = value
            elif name == b"content-length":
                self._declared = int(value)

    @property
    def trace_context(self) -> dict[str, str]:
        """The client's W3C trace context, if it sent one."""
        names = (b"traceparent", b"tracestate")
        return {n.decode(): v.decode("latin-1") for n, v in self.scope["headers"] if n in names}

    @property
    def pins_rank(self) -> bool:
        """Whether the client requests a specific engine."""
        return self._pinned_rank is not None

    @property
    def pinned_rank(self) -> int | None:
        """Return the rank of the engine that the client requests, if any.

        Raises:
            ApiError: the header is not a valid rank.
        """
        if self._pinned_rank is None:
            return None
        if not _RANK.fullmatch(self._pinned_rank):
            raise invalid(
                "X-data-parallel-rank: must be the rank of an engine", "X-data-parallel-rank"
            )
        return int(self._pinned_rank)

    async def read(self) -> None:
        """Read the body.

        Raises:
            ApiError: its content type is not JSON, or it is too large or too slow.
            ClientDisconnected: the client disconnected before it was complete.
        """
        media_type = self._content_type.partition(b";")[0].strip().lower()
        if media_type != b"application/json" and not media_type.endswith(b"+json"):
            raise ApiError(
                415,
                "The body must be JSON: send it with 'Content-Type: application/json'.",
                code="unsupported_media_type",
            )
        self.content = await self._read()
        try:
            self._counted_bytes = self.limits.budget.keep(len(self.content))
        except NoRoomForBody:
            self.content = b""
            raise unavailable(
                "The server is holding too many request bytes; retry later."
            ) from None

    def detached(self, send: Send) -> "Call":
        """Return a call for the same request and ID that continues after this one ends.

        It has no client to disconnect, and its response goes to `send`. It keeps only the headers
        for tracing and for the choice of an engine.
        """
        names = (b"traceparent", b"tracestate", b"x-data-parallel-rank")
        headers = [(name, value) for name, value in self.scope["headers"] if name in names]

        async def receive() -> Message:
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "path": self.path, "headers": headers, SCOPE_KEY: self.key}
        other = Call(scope, receive, send, self.limits)
        other.has_client = False
        other.content, other.request_id = self.content, self.request_id
        other._counted_bytes, self._counted_bytes = self._counted_bytes, 0
        return other

    def release(self) -> None:
        """Release everything that the call holds; idempotent."""
        if self.reservation is not None:
            self.reservation.release()
        while self.on_release:
            self.on_release.pop()()
        self.forget_body()

    def forget_body(self) -> None:
        """Free the body, which is not needed any more; idempotent."""
        self.content = b""
        size, self._counted_bytes = self._counted_bytes, 0
        self.limits.budget.drop(size)

    async def _read(self) -> bytes:
        self._check_size(self._declared)  # before `receive` sends "100 Continue"
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        first: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            self._check_size(len(first))
            return first
        held = self.limits.budget.hold()
        try:
            async with asyncio.timeout(self.limits.seconds):
                parts, size = [first], len(first)
                held.grow(size)
                while message.get("more_body", False):
                    self._check_size(size)
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    held.grow(len(parts[-1]))
                self._check_size(size)
                return b"".join(parts)
        except TimeoutError:
            seconds = self.limits.seconds
            raise timed_out(f"The body was not complete after {seconds:g} s.") from None
        except NoRoomForBody:
            raise unavailable(
                "The server is receiving too many request bytes; retry later."
            ) from None
        finally:
            held.release()

    def _check_size(self, size: int) -> None:
        if size > self.limits.max_bytes:
            raise ApiError(
                413,
                f"The body is larger than {self.limits.max_bytes} bytes.",
                code="body_too_large",
            )

    async def send_events(self, frames: bytes, *, more: bool) -> None:
        """Send part of an event stream; the first part starts the response."""
        if self._keep_alive_task is not None:
            await self._keep_alive_task
        if self.status is None:
            await self.start(200, list(_EVENT_STREAM))
        if frames or not more:
            self._sent_at = time.monotonic()
            await self._answer({"type": "http.response.body", "body": frames, "more_body": more})

    async def send_keep_alive(self) -> None:
        """Send the headers of an event stream or, if they have been sent, a comment."""
        self._sent_at = time.monotonic()
        if self.status is None:
            await self.start(200, list(_EVENT_STREAM))
        else:
            await self._answer({"type": "http.response.body", "body": COMMENT, "more_body": True})
        self._keep_alive_task = None

    def send(self, message: Message) -> Awaitable[None]:
        """Send a response message; headers get the request ID and the weight version."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.request_id.encode())]
            if self.weight_version is not None and (version := self.weight_version()):
                message["headers"].append((b"x-weight-version", version.encode()))
        return self._answer(message)

    async def start(self, status: int, headers: list[_Header]) -> None:
        """Start the response."""
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send part of the response body."""
        await self._answer({"type": "http.response.body", "body": body, "more_body": more})

    async def send_json(self, body: bytes) -> None:
        """Send a complete success."""
        await self.start(200, [_JSON, (b"content-length", str(len(body)).encode())])
        await self.write(body, more=False)

    async def send_json_parts(self, parts: Iterable[bytes]) -> None:
        """Send a success whose parts are generated as the client reads; yields in between."""
        piece = bytearray()
        for part in parts:
            piece += part
            if len(piece) < _PIECE_BYTES:
                continue
            if self.status is None:
                await self.start(200, [_JSON])
            await self.write(bytes(piece), more=True)
            piece.clear()
            await asyncio.sleep(0)
        if self.status is None:
            await self.send_json(bytes(piece))
        else:
            await self.write(bytes(piece), more=False)

    # -- while it is entered ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._disconnect is not None and self._disconnect.is_disconnected:
            raise ClientDisconnected
        self._owner = asyncio.current_task()
        if self._disconnect is not None:
            self._disconnect.add_callback(self._hang_up)
        elif self.has_client:
            self._watch = asyncio.create_task(self._wait_for_disconnect())
        return self

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._hang_up()

    def _hang_up(self) -> None:
        if self._owner is not None:
            self._hung_up = True
            self._owner.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        owner, self._owner = self._owner, None
        if self._disconnect is not None:
            self._disconnect.remove_callback(self._hang_up)
        for ended in (self._watch, self._timer, self._keep_alive_task):
            if ended is not None:
                ended.cancel()
        self._watch = self._timer = self._keep_alive_task = None  # breaks reference cycles
        if self._hung_up and owner is not None and owner.uncancel() == 0:
            raise ClientDisconnected from error

    def keep_alive(self, interval: float) -> None:
        """Send a stream's headers early, and comments while it is silent, until the exit.

        Load balancers cut silent connections. `interval` is the seconds of silence before a
        comment; 0 disables comments and early headers.
        """
        if interval and self.has_client:
            loop = asyncio.get_running_loop()
            first = min(HEADERS_WITHIN, interval)
            self._timer = loop.call_later(first, self._check_silence, interval, loop)

    def _check_silence(self, interval: float, loop: asyncio.AbstractEventLoop) -> None:
        silent = 0.0 if self.status is None else time.monotonic() - self._sent_at
        # A comment that is still being sent is blocked by a client that does not read.
        if self._keep_alive_task is None and (self.status is None or silent >= interval):
            self._keep_alive_task, silent = loop.create_task(self.send_keep_alive()), 0.0
        self._timer = loop.call_later(
            max(interval - silent, 0.1), self._check_silence, interval, loop
        )


class Pushed(Response):
    """A response that a function generates and sends over the call."""

    def __init__(self, push: Callable[[], Awaitable[None]]) -> None:
        self._push = push

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._push()
