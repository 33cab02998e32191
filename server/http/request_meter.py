"""Counts what a connection receives, wherever in a request it comes. Without I/O."""

from enum import Enum, auto
from typing import NamedTuple

FRAMING = 8
"""Bytes that may be received per byte of body: chunks of one byte take six."""

UNREAD = 16
"""Bytes per byte of the largest body that may come of a request that is answered already: who sends
all before reading learns why it was refused, as long as that does not take too long."""

FREE_CHUNKS = 2048
BYTES_PER_CHUNK = 64
"""A body may have FREE_CHUNKS chunks, and one more for every BYTES_PER_CHUNK bytes: each chunk
costs the parser microseconds, whatever its size."""

MAX_PIPELINED = 64
"""Requests of a connection that wait for the answers to those before them."""


class Phase(Enum):
    """What the client sends next."""

    IDLE = auto()
    """A request, some time."""
    HEAD = auto()
    """More of the head."""
    BODY = auto()
    """More of the body, or what frames it: chunk sizes, extensions, trailers."""


class MeterLimits(NamedTuple):
    """Largest head and body of a request, in bytes."""

    head: int
    body: int


class Excess(Exception):
    """A request exceeds a limit."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class RequestMeter:
    """The request that a connection is receiving.

    The parser's events come first, then `read` with the size of what it was fed. Whatever raises
    `Excess` ends the connection.
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
        """A request begins."""
        self.phase = Phase.HEAD
        self._head = self._fields = self._message = self._framing = 0
        self._chunks = self._body = 0
        self._answered = False

    def field(self, size: int) -> bool:
        """Count a part of the request line, a header or a trailer; return whether it is used."""
        self._fields += size
        if self._fields > self._limits.head:
            raise _HEAD_TOO_LARGE
        return self.phase is Phase.HEAD

    def head_ends(self, queued: int) -> None:
        """The head is complete; `queued` requests of the connection wait before this one."""
        self.phase = Phase.BODY
        self._progress = True
        if queued >= MAX_PIPELINED:
            raise _TOO_MANY

    def body(self, size: int) -> None:
        """Count bytes of the body."""
        self._progress = True
        self._body += size

    def chunk(self) -> None:
        """A complete chunk size."""
        self._progress = True
        self._chunks += 1
        if self._chunks > FREE_CHUNKS + self._body // BYTES_PER_CHUNK:
            raise _TOO_MANY_CHUNKS

    def end(self) -> None:
        """The request is complete."""
        self.phase = Phase.IDLE

    def answered(self) -> bool:
        """All requests are answered; return whether the client is still sending the last one."""
        self._answered = self.phase is Phase.BODY
        return self._answered

    def drop(self, size: int) -> None:
        """Count bytes of a request that has been answered already; they are not parsed."""
        self._message += size
        if self._message > self._limits.head + UNREAD * self._limits.body:
            raise _BODY_TOO_LARGE

    def read(self, size: int) -> None:
        """Count bytes that were fed to the parser and caused the events since the last call."""
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


_HEAD_TOO_LARGE = Excess(431, "The head of the request is too large.")
_FRAMING_TOO_LARGE = Excess(431, "Chunk extensions or trailers are too large.")
_BODY_TOO_LARGE = Excess(413, "The request is too large.")
_TOO_MANY_CHUNKS = Excess(413, "The body comes in too many small chunks.")
_TOO_MANY = Excess(429, "Too many requests wait on one connection.")
