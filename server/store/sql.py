"""Records in an SQL database shared by several front ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.limits import MAX_CHAIN, MAX_STORED_BATCHES, MAX_STORED_ITEMS, MAX_STORED_LENGTH
from server.store.records import (
    ROW_BYTES,
    UNFINISHED,
    DiskFull,
    Part,
    Progress,
    Record,
    StoreFull,
    TooLong,
)

if TYPE_CHECKING:
    from server.store.postgres import PostgresDatabase
    from server.store.sqlite import SqliteDatabase

_INPUT, _BODY = -2, -1
"""Positions in `parts` of a record's input and body."""
_COLUMNS = "id, tenant, created, status, previous, conversation, beat"
_TEXT = (
    "(SELECT body FROM parts WHERE parts.tenant = records.tenant AND record = records.id"
    " AND position = {})"
)
_SELECT = f"SELECT {_COLUMNS}, {_TEXT.format(_INPUT)}, {_TEXT.format(_BODY)} FROM records"
_LENGTH = "SELECT sum(length(body)) FROM parts WHERE tenant = ? AND record = ? AND position < 0"
_ONE = "tenant = ? AND id = ?"


@dataclass(eq=False)
class SqlBackend:
    """Stores records, limited in size and age; not thread-safe.

    If there is no room, the least recently used record of the tenant with the most bytes is
    deleted. Every change is one transaction. Methods raise `BackendFailed`, and `StoreFull` if they
    add something.
    """

    database: "SqliteDatabase | PostgresDatabase"
    """Contains the tables; not thread-safe."""
    max_bytes: int
    """Maximum total of all records."""
    max_age: float
    """Seconds for which a record is kept after its last use."""
    evicted: Callable[[str], None] = lambda _: None
    """Called with the reason of each deletion: age, limit or disk."""
    total = 0
    """Bytes of all records at the last change."""

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def put(
        self, tenant: str, record: Record, items: Sequence[Part] = (), only_known: bool = False
    ) -> None:
        """Store a record; replaces an unfinished response or a conversation with the same ID.

        Items are added to the response's conversation.

        Args:
            only_known: store nothing if the record does not exist or was deleted.

        Raises:
            TooLong: the conversation would have too many items, or be too large.
        """
        (length,) = self._execute(_LENGTH, tenant, record.id).fetchone()
        more = sum(item.size for item in items)
        self._make_room(record.size - (length or 0) + more, tenant, record.id)
        with self.database.transaction():
            row = self._execute(
                f"SELECT status FROM records WHERE {_ONE}", tenant, record.id
            ).fetchone()
            if row is None and only_known:
                return
            if items and record.conversation is not None:
                self._add(tenant, record.conversation, items)
            (length,) = self._execute(_LENGTH, tenant, record.id).fetchone()
            if row is None:
                length = -ROW_BYTES
                self._execute(
                    f"INSERT INTO records ({_COLUMNS}, used, size)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0)",
                    record.id, tenant, record.created, record.status, record.previous,
                    record.conversation, record.beat,
                )  # fmt: skip
            elif row[0] and row[0] not in UNFINISHED:
                return
            else:
                self._execute(
                    f"UPDATE records SET status = ? WHERE {_ONE}", record.status, tenant, record.id
                )
            for position, text in ((_INPUT, record.input), (_BODY, record.body)):
                self._execute(
                    "INSERT INTO parts VALUES (?, ?, ?, '', ?)"
                    " ON CONFLICT (tenant, record, position) DO UPDATE SET body = excluded.body",
                    tenant, record.id, position, text,
                )  # fmt: skip
            self._grow(tenant, record.id, record.size - ROW_BYTES - length)

    def get(self, tenant: str, id_: str) -> Record | None:
        """Return a record without its items or events."""
        row = self._execute(f"{_SELECT} WHERE {_ONE}", tenant, id_).fetchone()
        names = (*_COLUMNS.split(", "), "input", "body")
        return None if row is None else Record(**dict(zip(names, row, strict=True)))

    def chain(self, tenant: str, id_: str) -> list[Record] | None:
        """Return a response and its predecessors, oldest first; None if one is missing.

        This counts as a use of all of them.

        Raises:
            TooLong: there are too many of them, or they are too large.
        """
        found: list[Record] = []
        size, following = 0, id_
        while following:
            record = self.get(tenant, following)
            if record is None:
                return None
            found.append(record)
            size += record.size
            if len(found) > MAX_CHAIN or size > MAX_STORED_LENGTH:
                raise TooLong
            following = record.previous or ""
        with self.database.transaction():
            for record in found:
                self._grow(tenant, record.id, 0)
        return found[::-1]

    def delete(self, tenant: str, id_: str) -> bool:
        """Delete a record with its parts; return whether it existed."""
        with self.database.transaction():
            return self._delete(_ONE, tenant, id_) > 0

    def cancel(self, tenant: str, id_: str) -> None:
        """Request the process that generates a response to cancel it."""
        with self.database.transaction():
            self._execute(f"UPDATE records SET cancelled = 1 WHERE {_ONE}", tenant, id_)

    def beat(self, tenant: str, ids: Sequence[str]) -> set[str]:
        """Record that responses are still being generated; return those cancelled or deleted."""
        stopped = set()
        with self.database.transaction():
            for id_ in ids:
                row = self._execute(
                    f"UPDATE records SET beat = beat + 1 WHERE {_ONE} RETURNING cancelled",
                    tenant, id_,
                ).fetchone()  # fmt: skip
                if row is None or row[0]:
                    stopped.add(id_)
        return stopped

    def progress(self, tenant: str, id_: str, after: int) -> Progress | None:
        """Return the progress of a response, with some of its events after number `after`.

        The first batch can start with earlier events.
        """
        # In this order: if the response has ended, all its events are visible.
        found = self._execute(f"SELECT status, beat FROM records WHERE {_ONE}", tenant, id_)
        row = found.fetchone()
        if row is None:
            return None
        return Progress(row[0], row[1], self._parts(tenant, id_, after + 1, MAX_STORED_BATCHES))

    def add(self, tenant: str, id_: str, parts: Sequence[Part]) -> bool:
        """Add parts to a record; return whether it exists.

        Raises:
            TooLong: a conversation would have too many items, or be too large.
        """
        self._make_room(sum(part.size for part in parts), tenant, id_)
        with self.database.transaction():
            return self._add(tenant, id_, parts)

    def items(self, tenant: str, id_: str) -> list[Part] | None:
        """Return all items of a conversation, which counts as a use; None if it does not exist."""
        with self.database.transaction():
            return self._parts(tenant, id_, 0) if self._grow(tenant, id_, 0) else None

    def delete_item(self, tenant: str, id_: str, item: str) -> bool:
        """Delete an item of a conversation; return whether it existed."""
        with self.database.transaction():
            row = self._execute(
                "DELETE FROM parts WHERE tenant = ? AND record = ? AND id = ? AND position >= 0"
                " RETURNING length(body)",
                tenant, id_, item,
            ).fetchone()  # fmt: skip
            if row is not None:
                self._grow(tenant, id_, -row[0] - ROW_BYTES)
            return row is not None

    def _execute(self, statement: str, *values: object) -> Any:
        return self.database.execute(statement, values)

    def _parts(
        self, tenant: str, id_: str, first: int, limit: int = MAX_STORED_ITEMS
    ) -> list[Part]:
        rows = self._execute(
            "SELECT id, body, position FROM parts WHERE tenant = ? AND record = ? AND position >="
            " coalesce((SELECT max(position) FROM parts WHERE tenant = ? AND record = ?"
            " AND position BETWEEN 0 AND ?), 0) ORDER BY position LIMIT ?",
            tenant, id_, tenant, id_, first, limit,
        ).fetchall()  # fmt: skip
        return [Part(id=name, body=body, position=position) for name, body, position in rows]

    def _add(self, tenant: str, id_: str, parts: Sequence[Part]) -> bool:
        size = self._grow(tenant, id_, sum(part.size for part in parts))
        if not size:
            return False
        (last,) = self._execute(
            "SELECT coalesce(max(position), -1) FROM parts WHERE tenant = ? AND record = ?",
            tenant, id_,
        ).fetchone()  # fmt: skip
        for following, part in enumerate(parts, last + 1):
            position = part.position
            if position is None:
                position = following
                if size > MAX_STORED_LENGTH or position >= MAX_STORED_ITEMS:
                    raise TooLong
            self._execute(
                "INSERT INTO parts VALUES (?, ?, ?, ?, ?)",
                tenant, id_, position, part.id, part.body,
            )  # fmt: skip
        return True

    # -- room ------------------------------------------------------------------------------------

    def _grow(self, tenant: str, id_: str, by: int) -> int:
        """Add to the size of a record and mark it used; return its size, 0 if it does not exist."""
        row = self._execute(
            f"UPDATE records SET size = size + ?, used = ? WHERE {_ONE} RETURNING size",
            by, self.database.now(), tenant, id_,
        ).fetchone()  # fmt: skip
        if row is None:
            return 0
        self._account(tenant, by)
        return int(row[0])

    def _account(self, tenant: str, by: int) -> None:
        self._execute(
            "INSERT INTO tenants VALUES (?, ?)"
            " ON CONFLICT (tenant) DO UPDATE SET bytes = tenants.bytes + excluded.bytes",
            tenant, by,
        )  # fmt: skip

    def _delete(self, where: str, *values: object) -> int:
        deleted = self._execute(
            f"DELETE FROM records WHERE {where} RETURNING tenant, size", *values
        ).fetchall()
        for tenant, size in deleted:
            self._account(tenant, -size)
        return len(deleted)

    def _make_room(self, size: int, tenant: str, kept: str) -> None:
        """Delete expired records, and others until `size` more bytes fit, except `kept`.

        Runs in a separate transaction: a database cannot reuse space that it may have to restore.
        """
        with self.database.transaction():
            too_old = self.database.now() - self.max_age
            expired = self._delete(
                "(tenant, id) IN (SELECT tenant, id FROM records WHERE used < ?"
                " AND NOT (tenant = ? AND id = ?) LIMIT 100)",
                too_old, tenant, kept,
            )  # fmt: skip
            for _ in range(expired):
                self.evicted("age")
            while True:
                (total,) = self._execute("SELECT coalesce(sum(bytes), 0) FROM tenants").fetchone()
                self.total = int(total) + size
                fits = self.total <= self.max_bytes
                if fits and self.database.has_room(size):
                    return
                if size > self.max_bytes or not self._delete_oldest(tenant, kept):
                    if fits:
                        raise DiskFull(
                            "the store's file system is full, and no record can be deleted"
                        )
                    raise StoreFull(f"the store is limited to {self.max_bytes} bytes")
                self.evicted("disk" if fits else "limit")

    def _delete_oldest(self, *kept: str) -> bool:
        """Delete the least recently used record of the tenant with the most bytes."""
        for (tenant,) in self._execute(
            "SELECT tenant FROM tenants WHERE bytes > 0 ORDER BY bytes DESC"
        ).fetchall():
            if self._delete(
                "(tenant, id) IN (SELECT tenant, id FROM records WHERE tenant = ?"
                " AND NOT (tenant = ? AND id = ?) ORDER BY used LIMIT 1)",
                tenant, *kept,
            ):  # fmt: skip
                return True
        return False
