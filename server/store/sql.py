"""Records in an SQL database, which all front ends that share them have open."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from server.access.limits import MAX_CHAIN, MAX_KEPT_ITEMS, MAX_KEPT_LENGTH
from server.store.records import (
    ROW_BYTES,
    EventBatch,
    StoredConversation,
    StoredItem,
    StoredResponse,
    StoreFull,
    TooLong,
)

TABLES = """
CREATE TABLE IF NOT EXISTS tenants (tenant TEXT PRIMARY KEY, bytes BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, created DOUBLE PRECISION NOT NULL,
    used DOUBLE PRECISION NOT NULL, status TEXT NOT NULL, previous TEXT, conversation TEXT,
    lease DOUBLE PRECISION, cancelled INTEGER NOT NULL DEFAULT 0, size BIGINT NOT NULL,
    input {BYTES} NOT NULL, response {BYTES} NOT NULL,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (tenant, used);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (used);
CREATE TABLE IF NOT EXISTS conversations (
    tenant TEXT NOT NULL, id TEXT NOT NULL, created DOUBLE PRECISION NOT NULL,
    used DOUBLE PRECISION NOT NULL, size BIGINT NOT NULL, metadata {BYTES} NOT NULL,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (tenant, used);
CREATE INDEX IF NOT EXISTS conversations_by_age ON conversations (used);
CREATE TABLE IF NOT EXISTS events (
    tenant TEXT NOT NULL, response TEXT NOT NULL, first BIGINT NOT NULL, frames {BYTES} NOT NULL,
    PRIMARY KEY (tenant, response, first)
);
CREATE TABLE IF NOT EXISTS items (
    tenant TEXT NOT NULL, conversation TEXT NOT NULL, position BIGINT NOT NULL, id TEXT NOT NULL,
    item {BYTES} NOT NULL,
    PRIMARY KEY (tenant, conversation, position)
);
"""
"""With them, triggers keep each tenant's bytes as the sum of its sizes, and forget the events of a
response that is forgotten."""
_COLUMNS = "id, tenant, created, status, previous, conversation, input, response, lease"


class Rows(Protocol):
    """What came of a statement."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class Database(Protocol):
    """A connection to a database, used by one thread at a time.

    Every method raises `BackendFailed` if the database does not do it.
    """

    def execute(self, statement: str, values: Sequence[object] = ()) -> Rows:
        """Execute a statement whose values are `?`, in the transaction if there is one."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """Make changes that are kept together, or not at all; nobody else makes any meanwhile."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


class SqlBackend:
    """Keeps so many bytes for so long; the tenant that has most gives way first, its oldest first.

    Used by one thread at a time. Processes that die in a write leave nothing of it: every change
    is one transaction.

    More than 20 methods: those of the interface `Backend`.

    Args:
        database: has the tables.
        max_bytes: of all records.
        max_age: seconds for which a record is kept after its last use.
    """

    def __init__(self, database: Database, max_bytes: int, max_age: float) -> None:
        self._database = database
        self._max_bytes = max_bytes
        self._max_age = max_age

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()

    def put(
        self,
        record: StoredResponse,
        items: Sequence[StoredItem],
        now: float,
        only_known: bool = False,
    ) -> None:
        """Keep a response, in place of the unfinished one, and its items with its conversation."""
        with self._database.transaction():
            if only_known and self.get(record.tenant, record.id) is None:
                return
            if record.conversation is not None and items:
                self._add_items(record.tenant, record.conversation, items, now)
            self._make_room(record.size, now, record.tenant, record.id)
            self._database.execute(
                f"INSERT INTO responses ({_COLUMNS}, used, size)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (tenant, id) DO UPDATE SET status = excluded.status,"
                " input = excluded.input, response = excluded.response, lease = excluded.lease,"
                " used = excluded.used, size = excluded.size + (SELECT"
                " coalesce(sum(length(frames)), 0) FROM events WHERE events.tenant ="
                " responses.tenant AND events.response = responses.id)"
                " WHERE responses.status IN ('queued', 'in_progress')",
                (
                    record.id, record.tenant, record.created, record.status, record.previous,
                    record.conversation, record.input, record.response, record.lease, now,
                    record.size,
                ),
            )  # fmt: skip

    def get(self, tenant: str, id_: str) -> StoredResponse | None:
        """Return a response."""
        row = self._database.execute(
            f"SELECT {_COLUMNS} FROM responses WHERE tenant = ? AND id = ?", (tenant, id_)
        ).fetchone()
        return None if row is None else _response(row)

    def chain(self, tenant: str, id_: str, now: float) -> list[StoredResponse] | None:
        """Return a response after all that it goes on with, the oldest first; None: one is gone."""
        found: list[StoredResponse] = []
        size, following = 0, id_
        while following:
            record = self.get(tenant, following)
            if record is None:
                return None
            found.append(record)
            size += record.size
            if len(found) > MAX_CHAIN or size > MAX_KEPT_LENGTH:
                raise TooLong
            following = record.previous or ""
        with self._database.transaction():
            for record in found:
                self._database.execute(
                    "UPDATE responses SET used = ? WHERE tenant = ? AND id = ?",
                    (now, tenant, record.id),
                )
        return found[::-1]

    def delete(self, tenant: str, id_: str) -> bool:
        """Forget a response; return whether there was one."""
        with self._database.transaction():
            gone = self._database.execute(
                "DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, id_)
            )
            return gone.rowcount > 0

    def cancel(self, tenant: str, id_: str) -> None:
        """Ask whoever makes a response to give it up."""
        with self._database.transaction():
            self._database.execute(
                "UPDATE responses SET cancelled = 1 WHERE tenant = ? AND id = ?", (tenant, id_)
            )

    def renew(self, tenant: str, ids: Sequence[str], lease: float) -> set[str]:
        """Note that responses are being made; return which are to be given up, or are gone."""
        given_up = set()
        with self._database.transaction():
            for id_ in ids:
                row = self._database.execute(
                    "UPDATE responses SET lease = ? WHERE tenant = ? AND id = ?"
                    " RETURNING cancelled",
                    (lease, tenant, id_),
                ).fetchone()
                if row is None or row[0]:
                    given_up.add(id_)
        return given_up

    def add_events(self, tenant: str, id_: str, batch: EventBatch, now: float) -> None:
        """Keep events with a response, if there is one; they are forgotten with it."""
        size = len(batch.frames)
        with self._database.transaction():
            self._make_room(size, now, tenant, id_)
            grown = self._database.execute(
                "UPDATE responses SET size = size + ? WHERE tenant = ? AND id = ?",
                (size, tenant, id_),
            )
            if grown.rowcount:
                self._database.execute(
                    "INSERT INTO events VALUES (?, ?, ?, ?)",
                    (tenant, id_, batch.first, batch.frames),
                )

    def events(self, tenant: str, id_: str, after: int) -> list[EventBatch]:
        """Return a response's events in order, from the batch on that has number `after` + 1."""
        rows = self._database.execute(
            "SELECT first, frames FROM events WHERE tenant = ? AND response = ? AND first >="
            " coalesce((SELECT max(first) FROM events WHERE tenant = ? AND response = ?"
            " AND first <= ?), 0) ORDER BY first",
            (tenant, id_, tenant, id_, after + 1),
        ).fetchall()
        return [EventBatch(first=first, frames=frames) for first, frames in rows]

    def put_conversation(self, conversation: StoredConversation, now: float) -> None:
        """Keep a conversation, or what is new of its metadata."""
        size = conversation.size
        with self._database.transaction():
            self._make_room(size, now, conversation.tenant, conversation.id)
            self._database.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (tenant, id) DO UPDATE SET"
                " size = conversations.size + length(excluded.metadata)"
                " - length(conversations.metadata),"
                " metadata = excluded.metadata, used = excluded.used",
                (
                    conversation.tenant, conversation.id, conversation.created, now, size,
                    conversation.metadata,
                ),
            )  # fmt: skip

    def conversation(self, tenant: str, id_: str) -> StoredConversation | None:
        """Return a conversation."""
        row = self._database.execute(
            "SELECT created, metadata FROM conversations WHERE tenant = ? AND id = ?",
            (tenant, id_),
        ).fetchone()
        if row is None:
            return None
        return StoredConversation(id=id_, tenant=tenant, created=row[0], metadata=row[1])

    def delete_conversation(self, tenant: str, id_: str) -> bool:
        """Forget a conversation with its items; return whether there was one."""
        with self._database.transaction():
            return self._drop_conversation(tenant, id_)

    def add_items(self, tenant: str, id_: str, items: Sequence[StoredItem], now: float) -> bool:
        """Add items at the end of a conversation; return whether there is one."""
        with self._database.transaction():
            return self._add_items(tenant, id_, items, now)

    def _add_items(self, tenant: str, id_: str, items: Sequence[StoredItem], now: float) -> bool:
        size = sum(item.size for item in items)
        self._make_room(size, now, tenant, id_)
        row = self._database.execute(
            "UPDATE conversations SET size = size + ?, used = ?"
            " WHERE tenant = ? AND id = ? RETURNING size",
            (size, now, tenant, id_),
        ).fetchone()
        if row is None:
            return False
        (last,) = self._database.execute(
            "SELECT coalesce(max(position), -1) FROM items WHERE tenant = ? AND conversation = ?",
            (tenant, id_),
        ).fetchone()
        if row[0] > MAX_KEPT_LENGTH or last + 1 + len(items) > MAX_KEPT_ITEMS:
            raise TooLong
        for place, item in enumerate(items):
            self._database.execute(
                "INSERT INTO items VALUES (?, ?, ?, ?, ?)",
                (tenant, id_, last + 1 + place, item.id, item.item),
            )
        return True

    def items(self, tenant: str, id_: str, now: float) -> list[StoredItem] | None:
        """Return all items of a conversation, the oldest first; None if there is none."""
        with self._database.transaction():
            used = self._database.execute(
                "UPDATE conversations SET used = ? WHERE tenant = ? AND id = ?", (now, tenant, id_)
            )
            if not used.rowcount:
                return None
            rows = self._database.execute(
                "SELECT id, item FROM items WHERE tenant = ? AND conversation = ?"
                " ORDER BY position",
                (tenant, id_),
            ).fetchall()
        return [StoredItem(id=row[0], item=row[1]) for row in rows]

    def delete_item(self, tenant: str, id_: str, item: str) -> bool:
        """Forget an item; return whether there was one."""
        with self._database.transaction():
            row = self._database.execute(
                "DELETE FROM items WHERE tenant = ? AND conversation = ? AND id = ?"
                " RETURNING length(item)",
                (tenant, id_, item),
            ).fetchone()
            if row is None:
                return False
            self._database.execute(
                "UPDATE conversations SET size = size - ? WHERE tenant = ? AND id = ?",
                (row[0] + ROW_BYTES, tenant, id_),
            )
        return True

    def _make_room(self, size: int, now: float, tenant: str, kept: str) -> None:
        """Forget what is too old, and then what is in the way of so many bytes more.

        What is named `kept` of the tenant stays.
        """
        if size > self._max_bytes:
            raise StoreFull
        for table, drop in (
            ("responses", self._drop_response),
            ("conversations", self._drop_conversation),
        ):
            for row in self._database.execute(
                f"SELECT tenant, id FROM {table} WHERE used < ? LIMIT 100", (now - self._max_age,)
            ).fetchall():
                if tuple(row) != (tenant, kept):
                    drop(*row)
        while True:
            (total,) = self._database.execute(
                "SELECT coalesce(sum(bytes), 0) FROM tenants"
            ).fetchone()
            if total + size <= self._max_bytes:
                return
            if not self._drop_oldest((tenant, kept)):
                raise StoreFull

    def _drop_oldest(self, kept: tuple[str, str]) -> bool:
        """Forget the record that was used longest ago, of the tenant that has most of them."""
        for (tenant,) in self._database.execute(
            "SELECT tenant FROM tenants WHERE bytes > 0 ORDER BY bytes DESC"
        ).fetchall():
            row = self._database.execute(
                "SELECT id, used, 0 FROM responses WHERE tenant = ? AND NOT (tenant = ? AND id = ?)"
                " UNION ALL SELECT id, used, 1 FROM conversations"
                " WHERE tenant = ? AND NOT (tenant = ? AND id = ?) ORDER BY used LIMIT 1",
                (tenant, *kept, tenant, *kept),
            ).fetchone()
            if row is not None:
                (self._drop_conversation if row[2] else self._drop_response)(tenant, row[0])
                return True
        return False

    def _drop_response(self, tenant: str, id_: str) -> bool:
        found = self._database.execute(
            "DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, id_)
        )
        return found.rowcount > 0

    def _drop_conversation(self, tenant: str, id_: str) -> bool:
        self._database.execute(
            "DELETE FROM items WHERE tenant = ? AND conversation = ?", (tenant, id_)
        )
        found = self._database.execute(
            "DELETE FROM conversations WHERE tenant = ? AND id = ?", (tenant, id_)
        )
        return found.rowcount > 0


def _response(row: Sequence[Any]) -> StoredResponse:
    id_, tenant, created, status, previous, conversation, given, response, lease = row
    return StoredResponse(
        id=id_,
        tenant=tenant,
        created=created,
        status=status,
        previous=previous,
        conversation=conversation,
        input=given,
        response=response,
        lease=lease,
    )
