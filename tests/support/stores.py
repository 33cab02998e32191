"""A store of responses in a file, as a node has it."""

from pathlib import Path

from server.store.sql import SqlBackend
from server.store.sqlite import SqliteDatabase


def sqlite_backend(path: Path, max_bytes: int, max_age: float, lasting: bool = False) -> SqlBackend:
    """Return what keeps so many bytes for so many seconds."""
    return SqlBackend(SqliteDatabase(path, lasting=lasting), max_bytes, max_age)
