"""Records of the store: responses and conversations, each owned by a tenant."""

import time
from typing import Literal

import msgspec

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

ROW_BYTES = 256
"""Bytes that a row counts against the store's limit in addition to its texts."""

UNFINISHED: frozenset[str] = frozenset(("queued", "in_progress"))


class Record(msgspec.Struct, kw_only=True):
    """A response with its input items, or a conversation."""

    id: str
    tenant: str
    created: float
    """Unix time in seconds."""
    status: Status | Literal[""] = ""
    """Status of a response; empty for a conversation."""
    previous: str | None = None
    """ID of the response that this one continues."""
    conversation: str | None = None
    input: bytes = b""
    """JSON array of the items that a response's request added."""
    body: bytes
    """JSON of a response as shown to clients, or of a conversation's metadata."""
    beat: int = 0
    """Heartbeat counter while a process generates the response."""

    @property
    def size(self) -> int:
        """Bytes that count against the store's limit, without parts."""
        return len(self.input) + len(self.body) + ROW_BYTES


class Part(msgspec.Struct, kw_only=True):
    """An item of a conversation, or consecutive events of a background response."""

    id: str = ""
    body: bytes
    """JSON object of an item, or event frames as sent to clients."""
    position: int | None = None
    """Number of the first event, from 0; None for an item, which is appended."""

    @property
    def size(self) -> int:
        """Bytes that count against the store's limit."""
        return len(self.body) + ROW_BYTES


class Progress(msgspec.Struct):
    """Progress of a background response."""

    status: str
    beat: int
    events: list[Part]


class TooLong(Exception):
    """A conversation exceeds what one request can have."""


class StoreFull(Exception):
    """There is no room, even after deleting other records; the message says where."""


class BackendFailed(Exception):
    """The database is unavailable; the message is for the log."""


class DiskFull(BackendFailed):
    """The database's file system is full."""


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
"""Texts of unbounded length are in `parts`, because every update of a row rewrites all of it."""


def since_boot() -> float:
    """Return seconds since boot: unaffected by clock changes, and the same in all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
