"""Tests for every database; each database's tests import them and define an `opener`."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator

import msgspec
import pytest

from server.limits import MAX_STORED_LENGTH
from server.store.records import ROW_BYTES, Part, Record, StoreFull, TooLong
from server.store.sql import SqlBackend
from tests.support.waiting import PATIENCE

DAY = 86_400.0


Opener = Callable[[int, float], SqlBackend]
"""Opens the store again, given its maximum bytes and age; must be picklable."""


@pytest.fixture
def store(opener: Opener) -> Iterator[SqlBackend]:
    backend = opener(100_000, DAY)
    yield backend
    backend.close()


@pytest.fixture
def clock(store: SqlBackend, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A store's clock: a list with the current time."""
    time = [1.0]
    monkeypatch.setattr(store.database, "now", lambda: time[0])
    return time


def response(id_: str, tenant: str = "a", size: int = 0, **more: str | None) -> Record:
    return Record(
        id=id_,
        tenant=tenant,
        created=1.0,
        status="completed",
        input=b"[]",
        body=b'"' + b"x" * size + b'"',
        previous=more.get("previous"),
    )


def put(store: SqlBackend, record: Record, *, only_known: bool = False) -> None:
    store.put(record.tenant, record, only_known=only_known)


def conversation(store: SqlBackend, id_: str, tenant: str = "a") -> None:
    put(store, Record(id=id_, tenant=tenant, created=1.0, body=b"{}"))


def test_stored_records_are_visible_only_to_their_tenant(store: SqlBackend) -> None:
    put(store, response("r1"))
    assert store.get("a", "r1") == response("r1")
    assert store.get("b", "r1") is None
    assert store.chain("b", "r1") is None
    assert not store.delete("b", "r1")


def test_same_id_of_other_tenant_is_another_response(store: SqlBackend) -> None:
    put(store, response("r1", "a", size=1))
    put(store, response("r1", "b", size=2))
    assert store.get("a", "r1") == response("r1", "a", size=1)


def test_records_are_visible_to_all_processes(store: SqlBackend, opener: Opener) -> None:
    other = opener(100_000, DAY)
    put(store, response("r1"))
    assert other.get("a", "r1") is not None
    assert other.delete("a", "r1")
    put(store, response("r1"), only_known=True)
    assert store.get("a", "r1") is None, "what was forgotten does not come back"
    other.close()
    assert store.get("a", "r1") is None


def test_a_conversation_is_a_chain_of_responses(store: SqlBackend) -> None:
    for number in range(4):
        put(store, response(f"r{number}", previous=f"r{number - 1}" if number else None))
    chain = store.chain("a", "r3")
    assert chain is not None
    assert [each.id for each in chain] == ["r0", "r1", "r2", "r3"]
    store.delete("a", "r1")
    assert store.chain("a", "r3") is None


def test_a_chain_that_is_too_large_is_refused(opener: Opener) -> None:
    store = opener(4 * MAX_STORED_LENGTH, DAY)
    put(store, response("r0", size=MAX_STORED_LENGTH // 2))
    put(store, response("r1", size=MAX_STORED_LENGTH // 2, previous="r0"))
    with pytest.raises(TooLong):
        store.chain("a", "r1")
    store.close()


def test_a_chain_of_too_many_responses_is_refused(
    store: SqlBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.store.sql.MAX_CHAIN", 2)
    for number in range(3):
        put(store, response(f"r{number}", previous=f"r{number - 1}" if number else None))
    assert len(store.chain("a", "r1") or ()) == 2
    with pytest.raises(TooLong):
        store.chain("a", "r2")


def test_cyclic_chain_ends(store: SqlBackend) -> None:
    put(store, response("r0", previous="r0"))
    with pytest.raises(TooLong):
        store.chain("a", "r0")


def test_expired_records_are_deleted(store: SqlBackend, clock: list[float]) -> None:
    put(store, response("old"))
    put(store, response("used"))
    conversation(store, "c")
    clock[0] += DAY
    store.chain("a", "used")
    clock[0] += 1
    put(store, response("new"))
    assert store.get("a", "old") is None
    assert store.get("a", "c") is None
    assert store.get("a", "used") is not None


def test_oldest_records_of_largest_tenant_are_evicted_first(
    store: SqlBackend, clock: list[float]
) -> None:
    put(store, response("small", "b"))
    for number in range(30):
        clock[0] += 1
        put(store, response(f"r{number}", "a", size=10_000))
    assert store.get("b", "small") is not None
    assert store.get("a", "r0") is None
    assert store.get("a", "r29") is not None
    assert store.get("a", "r24") is not None


def test_records_larger_than_store_are_refused(store: SqlBackend) -> None:
    put(store, response("r0"))
    with pytest.raises(StoreFull):
        put(store, response("r1", size=200_000))
    assert store.get("a", "r0") is not None


def test_a_response_that_is_written_again_counts_once(store: SqlBackend) -> None:
    put(store, response("other", size=30_000))
    unfinished = msgspec.structs.replace(response("r1", size=30_000), status="in_progress")
    for _ in range(20):
        put(store, unfinished)
    assert store.get("a", "other") is not None
    assert total(store) == response("r1", size=30_000).size * 2


def test_finished_response_is_not_overwritten(store: SqlBackend) -> None:
    cancelled = msgspec.structs.replace(response("r1"), status="cancelled")
    unfinished = msgspec.structs.replace(response("r1"), status="in_progress")
    put(store, unfinished)
    put(store, cancelled)
    put(store, response("r1", size=5))
    assert store.get("a", "r1") == cancelled


def test_unfinished_responses_are_cancelled_by_the_process_that_generates_them(
    store: SqlBackend,
) -> None:
    put(store, response("r1"))
    put(store, response("r2"))
    assert store.beat("a", ["r1", "r2"]) == set()
    kept = store.get("a", "r1")
    assert kept is not None
    assert kept.beat == 1
    store.cancel("a", "r1")
    store.delete("a", "r2")
    assert store.beat("a", ["r1", "r2"]) == {"r1", "r2"}


def events(store: SqlBackend, tenant: str, after: int) -> list[Part] | None:
    progress = store.progress(tenant, "r1", after)
    return None if progress is None else progress.events


def test_events_stay_in_order_and_are_deleted_with_their_response(store: SqlBackend) -> None:
    unfinished = msgspec.structs.replace(response("r1"), status="in_progress")
    put(store, unfinished)
    batches = [Part(position=first, body=b"x" * 9) for first in (0, 3, 12)]
    for batch in batches:
        store.add("a", "r1", [batch])
    assert not store.add("b", "r1", batches)
    for after, found in ((-1, batches), (0, batches), (2, batches[1:]), (11, batches[2:])):
        assert events(store, "a", after) == found
    assert events(store, "a", 99) == batches[2:]
    assert events(store, "b", -1) is None
    size = response("r1").size + sum(batch.size for batch in batches)
    assert total(store) == size
    put(store, response("r1"))
    assert total(store) == size
    store.delete("a", "r1")
    assert events(store, "a", -1) is None
    put(store, response("r1"))
    assert events(store, "a", -1) == []
    assert total(store) == response("r1").size


def total(store: SqlBackend) -> int:
    """Return the accounted bytes, which must equal the stored bytes."""
    (counted,) = store.database.execute("SELECT sum(bytes) FROM tenants").fetchone()
    (found,) = store.database.execute("SELECT sum(size) FROM records").fetchone()
    assert counted == found
    return int(counted)


def test_items_of_a_conversation_stay_in_order(store: SqlBackend) -> None:
    assert not store.add("a", "c", [])
    conversation(store, "c")
    items = [Part(id=f"i{number}", body=b"{}", position=number) for number in range(5)]
    added = [Part(id=item.id, body=item.body) for item in items]
    assert store.add("a", "c", added[:2])
    assert store.add("a", "c", added[2:])
    assert store.items("a", "c") == items
    assert store.items("b", "c") is None
    assert store.delete_item("a", "c", "i0")
    assert not store.delete_item("a", "c", "i0")
    assert store.items("a", "c") == items[1:]
    assert total(store) == 2 + ROW_BYTES + sum(item.size for item in items[1:])
    assert store.delete("a", "c")
    assert store.items("a", "c") is None
    conversation(store, "c")
    assert store.items("a", "c") == [], "nothing of the one before"


def test_metadata_of_a_conversation_can_change(store: SqlBackend) -> None:
    conversation(store, "c")
    put(store, Record(id="c", tenant="a", created=5.0, body=b'{"a":"b"}'))
    found = store.get("a", "c")
    assert found is not None
    assert (found.body, found.created) == (b'{"a":"b"}', 1.0)


def test_response_and_conversation_items_are_stored_atomically(store: SqlBackend) -> None:
    conversation(store, "c")
    turn = msgspec.structs.replace(response("r1"), conversation="c")
    store.put("a", turn, [Part(id="i", body=b"{}")])
    assert [item.id for item in store.items("a", "c") or ()] == ["i"]
    with pytest.raises(StoreFull):
        store.put("a", response_in("c", "r2", size=200_000), [Part(id="i2", body=b"{}")])
    assert [item.id for item in store.items("a", "c") or ()] == ["i"]


def response_in(conversation_: str, id_: str, size: int) -> Record:
    return msgspec.structs.replace(response(id_, size=size), conversation=conversation_)


def test_a_conversation_that_is_too_large_is_refused(opener: Opener) -> None:
    store = opener(4 * MAX_STORED_LENGTH, DAY)
    conversation(store, "c")
    item = Part(id="i", body=b"x" * (MAX_STORED_LENGTH // 2))
    store.add("a", "c", [item])
    with pytest.raises(TooLong):
        store.add("a", "c", [item])
    assert len(store.items("a", "c") or ()) == 1
    store.close()


def test_a_conversation_of_too_many_items_is_refused(
    store: SqlBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.store.sql.MAX_STORED_ITEMS", 2)
    conversation(store, "c")
    store.add("a", "c", [Part(id=id_, body=b"{}") for id_ in ("i", "j")])
    with pytest.raises(TooLong):
        store.add("a", "c", [Part(id="k", body=b"{}")])
    assert [each.id for each in store.items("a", "c") or ()] == ["i", "j"]


def _write_until_killed(opener: Opener, writer: "multiprocessing.connection.Connection") -> None:
    backend = opener(1 << 30, DAY)
    number = 0
    while True:
        put(backend, response(f"k{number}", size=5_000))
        writer.send(number)
        number += 1


def test_acknowledged_records_survive_death_of_writer(opener: Opener) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    writer = context.Process(target=_write_until_killed, args=(opener, theirs))
    writer.start()
    theirs.close()
    store = opener(1 << 30, DAY)
    acknowledged = -1
    for number in range(200):
        put(store, response(f"m{number}", size=100))
        while mine.poll():
            acknowledged = mine.recv()
    while acknowledged < 50:
        acknowledged = mine.recv()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(PATIENCE)
    while mine.poll():
        try:
            acknowledged = mine.recv()
        except EOFError:
            break
    mine.close()
    for number in range(acknowledged + 1):
        assert store.get("a", f"k{number}") == response(f"k{number}", size=5_000)
    assert all(store.get("a", f"m{number}") for number in range(200))
    store.close()
