"""Records in a file of SQLite."""

import os
import sqlite3
import time
from functools import partial
from pathlib import Path

import pytest

from server.store.records import DiskFull
from server.store.sql import SqlBackend
from server.store.sqlite import SqliteDatabase
from tests.server.store.contract import *  # noqa: F403
from tests.support.disks import fill, small_disk
from tests.support.stores import sqlite_backend


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.sqlite"


@pytest.fixture(params=[True, False], ids=["lasting", "of the node"])
def opener(path: Path, request: pytest.FixtureRequest) -> Opener:  # noqa: F405
    return partial(sqlite_backend, path, lasting=request.param)


def test_database_file_is_private_to_its_owner(path: Path, opener: Opener) -> None:  # noqa: F405
    opener(1000, DAY).close()  # noqa: F405
    assert path.stat().st_mode & 0o077 == 0
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_invalid_database_file_is_reported(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(OSError, match=r"responses\.sqlite cannot be used"):
        SqliteDatabase(path, lasting=True)


def test_store_waits_for_other_process_creating_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite itself does not wait for a lock when a file is switched to a write-ahead log."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waits: list[float] = []

    def give_way(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            other.execute("COMMIT")

    monkeypatch.setattr(time, "sleep", give_way)
    SqliteDatabase(path, lasting=True).close()
    assert len(waits) == 3
    other.close()


def evicted(path: Path, max_bytes: int) -> tuple[SqlBackend, list[str]]:
    """Return a node's store, and a list of its reasons for deletions."""
    reasons: list[str] = []
    database = SqliteDatabase(path, lasting=False)
    return SqlBackend(database, max_bytes, DAY, reasons.append), reasons  # noqa: F405


@pytest.mark.parametrize("lasting", [True, False])
def test_store_leaves_free_disk_space(tmp_path: Path, lasting: bool) -> None:
    """Then a tenant's large responses evict its own, and other tenants are not affected."""
    with small_disk(tmp_path / "disk", 16) as disk:
        store = sqlite_backend(disk / "responses.sqlite", 1 << 30, DAY, lasting)  # noqa: F405
        put(store, response("small", "b"))  # noqa: F405
        for number in range(60):
            put(store, response(f"r{number}", size=1 << 20))  # noqa: F405
            assert store.get("a", f"r{number}") is not None
        assert store.get("a", "r0") is None
        assert store.get("b", "small") is not None
        free = os.statvfs(disk)
        assert free.f_bavail * free.f_frsize > 1 << 20
        store.close()


def test_full_disk_is_reported_and_old_records_are_evicted(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        store, reasons = evicted(disk / "responses.sqlite", 1 << 30)
        for number in range(8):
            put(store, response(f"r{number}", size=1 << 20))  # noqa: F405
        filler = fill(disk)
        assert reasons == []
        put(store, response("new", size=1 << 19))  # noqa: F405
        assert store.get("a", "new") is not None
        assert set(reasons) == {"disk"}
        while store._delete_oldest("", ""):
            pass
        with pytest.raises(DiskFull):
            put(store, response("huge", size=12 << 20))  # noqa: F405
        filler.unlink()
        put(store, response("later"))  # noqa: F405
        store.close()


def test_a_front_end_starts_while_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        filler = fill(disk)
        store = sqlite_backend(disk / "responses.sqlite", 1 << 30, DAY)  # noqa: F405
        with pytest.raises(DiskFull):
            put(store, response("r0"))  # noqa: F405
        filler.unlink()
        put(store, response("r1"))  # noqa: F405
        assert store.get("a", "r1") is not None
        store.close()


def test_file_removed_by_cleaner_is_restored_for_all_front_ends(path: Path) -> None:
    one, other = (sqlite_backend(path, 100_000, DAY) for _ in range(2))  # noqa: F405
    put(one, response("before"))  # noqa: F405
    path.unlink()
    assert one.get("a", "before") is not None
    restarted = sqlite_backend(path, 100_000, DAY)  # noqa: F405
    put(other, response("after"))  # noqa: F405
    for store in (one, other, restarted):
        assert store.get("a", "before") is not None
        assert store.get("a", "after") is not None
    names = {path.name, f"{path.name}-journal"}
    assert {each.name for each in path.parent.iterdir()} <= names
    assert path.stat().st_mode & 0o077 == 0
    for store in (one, other, restarted):
        store.close()


@pytest.mark.parametrize("whole", [True, False])
def test_only_records_of_other_schema_version_are_dropped(path: Path, whole: bool) -> None:
    old = {"conversations", "events", "items", "responses", "tenants"}
    with sqlite3.connect(path) as connection:
        for name in old if whole else ("items",):
            connection.execute(f"CREATE TABLE {name} (tenant TEXT PRIMARY KEY, bytes BIGINT)")
    connection.close()
    sqlite_backend(path, 1000, DAY).close()  # noqa: F405
    with sqlite3.connect(path) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert {"records", "parts", "tenants"} <= names
    assert names & old == ({"tenants"} if whole else {"items", "tenants"})
