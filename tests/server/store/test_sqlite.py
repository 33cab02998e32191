"""Records in a file of SQLite."""

import sqlite3
import time
from functools import partial
from pathlib import Path

import pytest

from server.store.sqlite import sqlite_backend
from tests.server.store.contract import *  # noqa: F403


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.sqlite"


@pytest.fixture
def opener(path: Path) -> Opener:  # noqa: F405
    return partial(sqlite_backend, path)


def test_the_file_is_its_owners_alone(path: Path, opener: Opener) -> None:  # noqa: F405
    opener(1000, DAY).close()  # noqa: F405
    assert path.stat().st_mode & 0o077 == 0
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_a_file_that_is_no_database_is_said_to_be_none(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(OSError, match=r"responses\.sqlite cannot be used"):
        sqlite_backend(path, max_bytes=1000, max_age=1.0)


def test_a_file_that_another_is_setting_up_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite does not wait here: a file that is written is not made to have a write-ahead log."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waits: list[float] = []

    def give_way(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            other.execute("COMMIT")

    monkeypatch.setattr(time, "sleep", give_way)
    sqlite_backend(path, max_bytes=1000, max_age=1.0).close()
    assert len(waits) == 3
    other.close()
