"""Storage in a PostgreSQL database that the front ends of all nodes share."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from server.store.records import TABLES, BackendFailed, since_boot

_WAIT = 10
"""Timeout in seconds for connecting, for locks and for statements."""
_LOCK = 0x5357_454C_4C
"""Key of the advisory lock that every transaction takes."""


class PostgresDatabase:
    """A connection that is reopened when it is lost; methods raise `BackendFailed`.

    Its tables are in the schema `swell`.

    Args:
        url: `postgresql://...` as in libpq; omitted parts come from libpq's environment variables
            and files.

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
            raise OSError(f"the response store cannot be used: {error}") from error
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
        """Return the database's time at this process's start, plus the time elapsed since."""
        return self._epoch + since_boot()

    def has_room(self, _: int) -> bool:
        """Always true: disk space is the responsibility of the database's operator."""
        return True

    def execute(self, statement: str, values: Sequence[object] = ()) -> Any:
        """Execute a statement with `?` placeholders; return the library's cursor.

        Outside a transaction, a lost connection is reopened and the statement repeated.
        """
        # PostgreSQL does not accept NUL in text.
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
        """Make changes atomically, excluding changes by other processes."""
        self.execute("BEGIN")
        self._in_transaction = True
        try:
            self.execute("SELECT pg_advisory_xact_lock(?)", (_LOCK,))
            yield
            self.execute("COMMIT")
        except BaseException:
            if not self._connection.closed:
                with contextlib.suppress(BackendFailed):  # the server also rolls back by itself
                    self.execute("ROLLBACK")
            raise
        finally:
            self._in_transaction = False
