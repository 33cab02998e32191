"""A file-based response store, as on a node."""

from pathlib import Path

from server.store.sql import SqlBackend
from server.store.sqlite import SqliteDatabase


def sqlite_backend(path: Path, max_bytes: int, max_age: float, lasting: bool = False) -> SqlBackend:
    """Return a store limited to `max_bytes`, and to `max_age` seconds."""
    return SqlBackend(SqliteDatabase(path, lasting=lasting), max_bytes, max_age)
