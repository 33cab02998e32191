"""Calls to a store from an event loop: limits on waiting calls, by tenant."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.limits import MAX_JOBS, MAX_JOBS_OF_ONE
from server.store.records import Record
from server.store.service import ResponseStore, StoreUnavailable
from server.store.sql import SqlBackend
from tests.support.stores import sqlite_backend
from tests.support.waiting import PATIENCE


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def store(
    tmp_path: Path, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ResponseStore]:
    """A store blocked by another process until `go_on`."""
    backend = sqlite_backend(tmp_path / "responses.sqlite", 1 << 20, 3600.0)
    get = SqlBackend.get

    def held_up(self: SqlBackend, tenant: str, id_: str) -> Record | None:
        assert go_on.wait(PATIENCE)
        return get(self, tenant, id_)

    monkeypatch.setattr(SqlBackend, "get", held_up)
    made = ResponseStore(backend)
    yield made
    go_on.set()
    made.close()


async def flood(store: ResponseStore, tenant: str, number: int) -> list[object]:
    calls = [store.call(SqlBackend.get, tenant, str(each)) for each in range(number)]
    return list(await asyncio.gather(*calls, return_exceptions=True))


def test_one_tenant_leaves_room_in_the_queue_for_others(
    store: ResponseStore, go_on: threading.Event
) -> None:
    async def both() -> tuple[list[object], object]:
        greedy = asyncio.create_task(flood(store, "greedy", 2000))
        other = asyncio.create_task(store.call(SqlBackend.get, "other", "a"))
        for _ in range(5):  # all have called by then
            await asyncio.sleep(0)
        go_on.set()
        return await greedy, await other

    answers, of_other = asyncio.run(both())
    refused = [each for each in answers if isinstance(each, StoreUnavailable)]
    assert 1000 < len(refused) < 2000
    assert of_other is None


def test_one_tenant_leaves_background_jobs_for_others(
    store: ResponseStore, go_on: threading.Event
) -> None:
    go_on.set()

    async def begin(owner: str) -> int:
        number = 0
        while not store.jobs.has_max_jobs(owner):
            store.jobs.begin(f"{owner}{number}", owner, asyncio.sleep(60))
            number += 1
        return number

    async def all_of_them() -> tuple[int, int, int]:
        numbers = await begin("greedy"), await begin("other"), await begin("third")
        await store.jobs.close()
        return numbers

    assert asyncio.run(all_of_them()) == (MAX_JOBS_OF_ONE, MAX_JOBS - MAX_JOBS_OF_ONE, 0)
