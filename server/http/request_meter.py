"""Counts the bytes that a connection receives, in all parts of a request. No I/O."""

from enum import Enum, auto
from typing import NamedTuple

FRAMING = 8
"""Maximum received bytes per byte of body: one-byte chunks take six."""

UNREAD = 16
"""Maximum bytes received for an already answered request, per byte of the largest body: a client
that sends everything before reading learns the reason, unless that takes too long."""

FREE_CHUNKS = 2048
BYTES_PER_CHUNK = 64
"""A body may have FREE_CHUNKS chunks, plus one for every BYTES_PER_CHUNK bytes: each chunk costs
the parser microseconds, whatever its size."""

MAX_PIPELINED = 64
"""Maximum pipelined requests that wait for earlier responses on a connection."""


class Phase(Enum):
    """What the client is expected to send next."""

    IDLE = auto()
    """A new request, at any time."""
    HEAD = auto()
    """The rest of the head."""
    BODY = auto()
    """The rest of the body or its framing: chunk sizes, extensions, trailers."""


class MeterLimits(NamedTuple):
    """Largest head and body of a request, in bytes."""

    head: int
    body: int


class LimitExceeded(Exception):
    """A request exceeds a limit."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class RequestMeter:
    """Counts the request that a connection is receiving.

    Report the parser's events first, then call `read` with the number of bytes parsed. A method
    that raises `LimitExceeded` requires the connection to be closed.
    """

    def __init__(self, limits: MeterLimits) -> None:
        self._limits = limits
        self.phase = Phase.IDLE
        self._head = 0
        self._fields = 0
        self._message = 0
        self._framing = 0
        self._chunks = self._body = 0
        self._progress = False
        self._answered = False

    def begin(self) -> None:
        """Report the start of a request."""
        self.phase = Phase.HEAD
        self._head = self._fields = self._message = self._framing = 0
        self._chunks = self._body = 0
        self._answered = False

    def field(self, size: int) -> bool:
        """Count part of the request line, a header or a trailer; return whether to keep it."""
        self._fields += size
        if self._fields > self._limits.head:
            raise _HEAD_TOO_LARGE
        return self.phase is Phase.HEAD

    def head_ends(self, queued: int) -> None:
        """Report the end of the head; `queued` requests of the connection precede this one."""
        self.phase = Phase.BODY
        self._progress = True
        if queued >= MAX_PIPELINED:
            raise _TOO_MANY

    def body(self, size: int) -> None:
        """Count bytes of the body."""
        self._progress = True
        self._body += size

    def chunk(self) -> None:
        """Count a complete chunk header."""
        self._progress = True
        self._chunks += 1
        if self._chunks > FREE_CHUNKS + self._body // BYTES_PER_CHUNK:
            raise _TOO_MANY_CHUNKS

    def end(self) -> None:
        """Report the end of the request."""
        self.phase = Phase.IDLE

    def answered(self) -> bool:
        """Report that all requests are answered; return whether the last is still being sent."""
        self._answered = self.phase is Phase.BODY
        return self._answered

    def drop(self, size: int) -> None:
        """Count bytes of a request that is already answered; they are not parsed."""
        self._message += size
        if self._message > self._limits.head + UNREAD * self._limits.body:
            raise _BODY_TOO_LARGE

    def read(self, size: int) -> None:
        """Count bytes fed to the parser, after reporting the events that they caused."""
        progress, self._progress = self._progress, False
        if self.phase is Phase.HEAD:
            self._head += size
            if self._head > self._limits.head:
                raise _HEAD_TOO_LARGE
        elif self.phase is Phase.BODY:
            self._message += size
            self._framing = 0 if progress else self._framing + size
            if self._framing > self._limits.head:
                raise _FRAMING_TOO_LARGE
            factor = UNREAD if self._answered else FRAMING
            if self._message > self._limits.head + factor * self._limits.body:
                raise _BODY_TOO_LARGE


_HEAD_TOO_LARGE = LimitExceeded(431, "The head of the request is too large.")
_FRAMING_TOO_LARGE = LimitExceeded(431, "Chunk extensions or trailers are too large.")
_BODY_TOO_LARGE = LimitExceeded(413, "The request is too large.")
_TOO_MANY_CHUNKS = LimitExceeded(413, "The body comes in too many small chunks.")
_TOO_MANY = LimitExceeded(429, "Too many requests wait on one connection.")
