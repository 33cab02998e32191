"""A PostgreSQL database that the front ends of all nodes share."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from server.store.records import TABLES, BackendFailed, since_boot

_WAIT = 10
"""Seconds for which a front end waits for a connection, a lock or a statement."""
_LOCK = 0x5357_454C_4C
"""Number of the advisory lock that every transaction holds."""


class PostgresDatabase:
    """A connection that is reopened when it is lost; methods raise `BackendFailed`.

    Its tables are in a schema of its own, `swell`.

    Args:
        url: `postgresql://...`, as libpq has it; what it leaves out is in libpq's variables and
            files.

    Raises:
        OSError: the database cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._in_transaction = False
        try:
            self._connection = self._connect()
            with self.transaction():
                self.execute("CREATE SCHEMA IF NOT EXISTS swell")
                self.execute(TABLES.format(BYTES="BYTEA"))
            (epoch,) = self.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
        except (psycopg.Error, BackendFailed) as error:
            raise OSError(f"the store of responses cannot be used: {error}") from error
        self._epoch = float(epoch) - since_boot()

    def _connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        connection = psycopg.connect(
            self._url, autocommit=True, connect_timeout=_WAIT, application_name="swell"
        )
        for setting in (
            "search_path = swell", f"statement_timeout = '{_WAIT}s'",
            f"idle_in_transaction_session_timeout = '{2 * _WAIT}s'",
        ):  # fmt: skip
            connection.execute(f"SET {setting}".encode())
        return connection

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def now(self) -> float:
        """Return the database's time at the start of this process, and what has passed since."""
        return self._epoch + since_boot()

    def has_room(self, _: int) -> bool:
        """Always true: the database's operator looks after its disk."""
        return True

    def execute(self, statement: str, values: Sequence[object] = ()) -> Any:
        """Execute a statement whose values are `?`; return the library's cursor.

        Outside a transaction that is done on a new connection if this one is lost.
        """
        # No text here has a NUL, which the database does not take.
        sent = [each.replace("\0", "\ufffd") if isinstance(each, str) else each for each in values]
        text = statement.replace("?", "%s").encode()
        try:
            try:
                return self._connection.execute(text, sent or None)
            except psycopg.OperationalError:
                if self._in_transaction or not self._connection.closed:
                    raise
            self._connection = self._connect()
            return self._connection.execute(text, sent or None)
        except psycopg.Error as error:
            raise BackendFailed(str(error)) from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make changes atomically; no other process makes any at the same time."""
        self.execute("BEGIN")
        self._in_transaction = True
        try:
            self.execute("SELECT pg_advisory_xact_lock(?)", (_LOCK,))
            yield
            self.execute("COMMIT")
        except BaseException:
            if not self._connection.closed:
                with contextlib.suppress(BackendFailed):  # the server rolls back by itself, too
                    self.execute("ROLLBACK")
            raise
        finally:
            self._in_transaction = False
