"""One SQLite file, which all front ends of a node have open."""

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from server.store.records import BackendFailed
from server.store.sql import TABLES, Rows, SqlBackend

_WAIT = 10.0
"""Seconds for which a front end waits for others that write."""
_PAUSE = 0.02
"""Seconds between its tries where SQLite itself does not wait."""
_TRIGGERS = """
CREATE TRIGGER IF NOT EXISTS events_out AFTER DELETE ON responses BEGIN
    DELETE FROM events WHERE tenant = OLD.tenant AND response = OLD.id;
END;
""" + "".join(
    f"""
CREATE TRIGGER IF NOT EXISTS {table}_in AFTER INSERT ON {table} BEGIN
    INSERT INTO tenants VALUES (NEW.tenant, NEW.size)
        ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + NEW.size;
END;
CREATE TRIGGER IF NOT EXISTS {table}_out AFTER DELETE ON {table} BEGIN
    UPDATE tenants SET bytes = bytes - OLD.size WHERE tenant = OLD.tenant;
END;
CREATE TRIGGER IF NOT EXISTS {table}_change AFTER UPDATE OF size ON {table} BEGIN
    UPDATE tenants SET bytes = bytes + NEW.size - OLD.size WHERE tenant = NEW.tenant;
END;
"""
    for table in ("responses", "conversations")
)


def sqlite_backend(path: Path, max_bytes: int, max_age: float) -> SqlBackend:
    """Return what keeps records in a file.

    Raises:
        OSError: the file cannot be used.
    """
    return SqlBackend(SqliteDatabase(path), max_bytes, max_age)


class SqliteDatabase:
    """A file with a write-ahead log; see `server.store.sql.Database`.

    Args:
        path: of the file; it is made, readable by its owner alone, if it is not there.

    Raises:
        OSError: the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        path.touch(mode=0o600)
        try:
            self._connection = sqlite3.connect(
                path, timeout=_WAIT, isolation_level=None, check_same_thread=False
            )
            try:
                self._set_up(time.monotonic() + _WAIT)
            except BaseException:
                self._connection.close()
                raise
        except sqlite3.Error as error:
            raise OSError(f"{path} cannot be used as a store of responses: {error}") from error

    def _set_up(self, until: float) -> None:
        """Make what is not there yet; all front ends of a node do so at the same time.

        SQLite does not wait for another that writes a file which is about to get its write-ahead
        log: it says at once that it is busy.
        """
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = NORMAL")
                self._connection.executescript(TABLES.format(BYTES="BLOB") + _TRIGGERS)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(_PAUSE)
            else:
                return

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def execute(self, statement: str, values: Sequence[object] = ()) -> Rows:
        """Execute a statement."""
        try:
            return self._connection.execute(statement, tuple(values))
        except sqlite3.Error as error:
            raise BackendFailed(str(error)) from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make changes that are kept together, or not at all."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")
