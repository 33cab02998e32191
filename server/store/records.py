"""Records of the store: responses, and the conversations that they belong to, each of a tenant."""

import time
from typing import Literal

import msgspec

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

ROW_BYTES = 256
"""What a row counts against the store's limit besides its texts."""

UNFINISHED: frozenset[str] = frozenset(("queued", "in_progress"))


class Record(msgspec.Struct, kw_only=True):
    """A response with the items that it was made of, or a conversation."""

    id: str
    tenant: str
    created: float
    """Seconds since the epoch."""
    status: Status | Literal[""] = ""
    """Of a response; empty: a conversation."""
    previous: str | None = None
    """The response that this one continues."""
    conversation: str | None = None
    input: bytes = b""
    """JSON array of the items that a response's request added."""
    body: bytes
    """JSON of a response as clients see it, or of a conversation's metadata."""
    beat: int = 0
    """Grows while a process generates an unfinished response."""

    @property
    def size(self) -> int:
        """Bytes that count against the store's limit, without parts."""
        return len(self.input) + len(self.body) + ROW_BYTES


class Part(msgspec.Struct, kw_only=True):
    """An item of a conversation, or consecutive events of a background response."""

    id: str = ""
    body: bytes
    """JSON object of an item; frames of events as clients get them."""
    position: int | None = None
    """Number of the first of the events, from 0; None: an item, which is appended."""

    @property
    def size(self) -> int:
        """Bytes that count against the store's limit."""
        return len(self.body) + ROW_BYTES


class Progress(msgspec.Struct):
    """How far a background response is."""

    status: str
    beat: int
    events: list[Part]


class TooLong(Exception):
    """A conversation is longer than what one request may have."""


class StoreFull(Exception):
    """There is no room, even after other records were deleted; the message says where."""


class BackendFailed(Exception):
    """The database does not work now; the message is for the log."""


class DiskFull(BackendFailed):
    """The file system of the database has no room."""


TABLES = """
CREATE TABLE IF NOT EXISTS tenants (tenant TEXT PRIMARY KEY, bytes BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    tenant TEXT NOT NULL, id TEXT NOT NULL, created DOUBLE PRECISION NOT NULL,
    used DOUBLE PRECISION NOT NULL, status TEXT NOT NULL, previous TEXT, conversation TEXT,
    beat BIGINT NOT NULL, cancelled INTEGER NOT NULL DEFAULT 0, size BIGINT NOT NULL,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS records_by_use ON records (tenant, used);
CREATE INDEX IF NOT EXISTS records_by_age ON records (used);
CREATE TABLE IF NOT EXISTS parts (
    tenant TEXT NOT NULL, record TEXT NOT NULL, position BIGINT NOT NULL, id TEXT NOT NULL,
    body {BYTES} NOT NULL,
    PRIMARY KEY (tenant, record, position),
    FOREIGN KEY (tenant, record) REFERENCES records (tenant, id) ON DELETE CASCADE
);
"""
"""Texts of any length are in `parts`, as every change of a row writes all of it."""


def since_boot() -> float:
    """Return seconds that no change of the clock affects, the same in all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
