"""Storage in one SQLite file that all front ends of a node share."""

import contextlib
import errno
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from server.store.records import TABLES, BackendFailed, DiskFull, since_boot

logger = logging.getLogger(__name__)

_WAIT = 10.0
"""Seconds to wait for other writers."""
_PAUSE = 0.02
"""Seconds between retries where SQLite itself does not wait."""
_RESERVED_SHARE, _MAX_RESERVED = 8, 64 << 20
"""Reserve: an eighth of the file system, at most this many bytes, stays free."""
_JOURNAL = 1 << 18
"""Bytes of journal kept between transactions, because deleting needs space too."""
_TREES = 1 << 16
"""Bytes that indexes may need per addition, in addition to an eighth of its size."""
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
_VERSION = 1
"""Version of the tables, stored in the file."""
_OLD_TABLES = ("conversations", "events", "items", "responses", "tenants")
"""Tables of versions with separate tables for each kind of record."""


class SqliteDatabase:
    """An SQLite file; methods raise `BackendFailed`.

    Without `lasting` the file belongs to the node: it need not survive a machine crash, so writes
    do not wait for the disk, and it is restored if a cleaner of /tmp removes it.

    Args:
        path: of the file; created if missing, readable only by its owner.
        lasting: whether the file outlives the node.

    Raises:
        OSError: the file cannot be used.
    """

    def __init__(self, path: Path, *, lasting: bool) -> None:
        self._path = path
        self._journal = path.with_name(f"{path.name}-journal")
        self._lasting = lasting
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._in_transaction = False
        try:
            self._connected()
        except DiskFull as error:  # there may be space later, so the front end still starts
            logger.warning("the response store cannot be opened yet: %s", error)
        except BackendFailed as error:
            raise OSError(f"{path} cannot be used as a response store: {error}") from error

    def _connected(self) -> sqlite3.Connection:
        """Return a connection to the file currently at the path."""
        old = self._connection
        if old is not None:
            if self._in_transaction or self._lasting:
                return old
            with contextlib.suppress(OSError):
                if self._path.stat().st_ino == self._inode:
                    return old
        connection = None
        try:
            if old is not None and not self._path.exists():
                self._put_back(old)
            self._path.touch(mode=0o600)
            connection = sqlite3.connect(
                self._path, timeout=_WAIT, isolation_level=None, check_same_thread=False
            )
            self._set_up(connection, time.monotonic() + _WAIT)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, sqlite3.Error):
                raise self._failure(error) from error
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise DiskFull(f"{self._path}: {error}") from error
            raise
        if old is not None:
            old.close()
        self._connection, self._inode = connection, self._path.stat().st_ino
        return connection

    def _put_back(self, old: sqlite3.Connection) -> None:
        """Copy the deleted but still open file back to its path, unless another process has."""
        logger.warning("%s was removed: restored it", self._path)
        # Useless without its file, and SQLite fails to open it.
        self._journal.unlink(missing_ok=True)
        copy = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            with contextlib.closing(sqlite3.connect(copy)) as target:
                old.backup(target)
            copy.chmod(0o600)
            with contextlib.suppress(FileExistsError):
                os.link(copy, self._path)
        finally:
            copy.unlink(missing_ok=True)

    def _set_up(self, connection: sqlite3.Connection, until: float) -> None:
        """Create missing tables; all front ends of a node do so concurrently.

        While another process switches the file to a write-ahead log, SQLite does not wait but
        reports immediately that it is busy.
        """
        journal, synchronous = ("WAL", "NORMAL") if self._lasting else ("PERSIST", "OFF")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        while True:
            try:
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute(f"PRAGMA journal_mode = {journal}")
                connection.execute(f"PRAGMA synchronous = {synchronous}")
                connection.execute("PRAGMA wal_autocheckpoint = 256")
                # Some distributions overwrite deleted data, which needs a journal of equal size.
                connection.execute("PRAGMA secure_delete = FAST")
                connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL}")
                if _version(connection) != _VERSION:
                    connection.execute("BEGIN IMMEDIATE")
                    if _version(connection) != _VERSION:
                        _make_tables(connection)
                    connection.execute("COMMIT")
                connection.execute(
                    "INSERT INTO boots SELECT ?, ? WHERE NOT EXISTS"
                    " (SELECT 1 FROM boots WHERE id = ?)",
                    (boot, time.time() - since_boot(), boot),
                )
                (self._epoch,) = connection.execute(
                    "SELECT epoch FROM boots WHERE id = ?", (boot,)
                ).fetchone()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                if connection.in_transaction:
                    connection.rollback()
                time.sleep(_PAUSE)
            else:
                break
        if not self._lasting:
            with self._journal.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, _JOURNAL)

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()

    def now(self) -> float:
        """Return seconds since boot, plus the epoch stored by the first process of this boot."""
        return float(self._epoch) + since_boot()

    def has_room(self, size: int) -> bool:
        """Return whether the file has enough free pages, or the disk more than the reserve."""
        (unused,) = self.execute(
            "SELECT freelist_count * page_size FROM pragma_freelist_count, pragma_page_size"
        ).fetchone()
        size += (size >> 3) + _TREES
        if unused > size:
            return True
        disk = os.statvfs(self._path.parent)
        reserved = min(disk.f_blocks // _RESERVED_SHARE * disk.f_frsize, _MAX_RESERVED)
        return disk.f_bavail * disk.f_frsize > size + reserved

    def execute(self, statement: str, values: Sequence[object] = ()) -> Any:
        """Execute a statement with `?` placeholders, within the current transaction if any."""
        try:
            return self._connected().execute(statement, tuple(values))
        except sqlite3.Error as error:
            raise self._failure(error) from error
        except OSError as error:
            raise BackendFailed(str(error)) from error

    def _failure(self, error: sqlite3.Error) -> BackendFailed:
        if getattr(error, "sqlite_errorcode", 0) in _FULL:
            return DiskFull(f"{self._path}: {error}")
        return BackendFailed(f"{self._path}: {error}")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make changes atomically, excluding changes by other processes."""
        self.execute("BEGIN IMMEDIATE")
        self._in_transaction = True
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            if self._connection is not None and self._connection.in_transaction:
                self.execute("ROLLBACK")
            raise
        finally:
            self._in_transaction = False


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _make_tables(connection: sqlite3.Connection) -> None:
    found = connection.execute("SELECT name FROM sqlite_master").fetchall()
    if {(name,) for name in _OLD_TABLES} <= set(found):
        for name in _OLD_TABLES:
            connection.execute(f"DROP TABLE {name}")
    tables = TABLES.format(BYTES="BLOB")
    tables += "CREATE TABLE IF NOT EXISTS boots (id TEXT PRIMARY KEY, epoch REAL)"
    for statement in tables.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {_VERSION}")
