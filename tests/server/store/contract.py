"""What holds of records wherever they are; each database's tests import it, and name an opener."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator

import msgspec
import pytest

from server.access.limits import MAX_KEPT_LENGTH
from server.store.records import (
    EventBatch,
    StoredConversation,
    StoredItem,
    StoredResponse,
    StoreFull,
    TooLong,
)
from server.store.sql import SqlBackend
from tests.support.waiting import PATIENCE

DAY = 86_400.0


Opener = Callable[[int, float], SqlBackend]
"""Opens the records once more, to keep so many bytes for so long; can be sent to a process."""


@pytest.fixture
def store(opener: Opener) -> Iterator[SqlBackend]:
    backend = opener(100_000, DAY)
    yield backend
    backend.close()


def response(id_: str, tenant: str = "a", size: int = 0, **more: str | None) -> StoredResponse:
    return StoredResponse(
        id=id_,
        tenant=tenant,
        created=1.0,
        status="completed",
        input=b"[]",
        response=b'"' + b"x" * size + b'"',
        previous=more.get("previous"),
    )


def conversation(store: SqlBackend, id_: str, tenant: str = "a", now: float = 1.0) -> None:
    kept = StoredConversation(id=id_, tenant=tenant, created=now, metadata=b"{}")
    store.put_conversation(kept, now)


def test_what_was_put_is_there_for_its_tenant_alone(store: SqlBackend) -> None:
    store.put(response("r1"), [], now=1.0)
    assert store.get("a", "r1") == response("r1")
    assert store.get("b", "r1") is None
    assert store.chain("b", "r1", 1.0) is None
    assert not store.delete("b", "r1")


def test_the_same_name_of_another_tenant_is_another_response(store: SqlBackend) -> None:
    store.put(response("r1", "a", size=1), [], now=1.0)
    store.put(response("r1", "b", size=2), [], now=1.0)
    assert store.get("a", "r1") == response("r1", "a", size=1)


def test_all_who_have_it_open_see_it(store: SqlBackend, opener: Opener) -> None:
    other = opener(100_000, DAY)
    store.put(response("r1"), [], now=1.0)
    assert other.get("a", "r1") is not None
    assert other.delete("a", "r1")
    store.put(response("r1"), [], now=2.0, only_known=True)
    assert store.get("a", "r1") is None, "what was forgotten does not come back"
    other.close()
    assert store.get("a", "r1") is None


def test_a_conversation_is_a_chain_of_responses(store: SqlBackend) -> None:
    for number in range(4):
        store.put(
            response(f"r{number}", previous=f"r{number - 1}" if number else None), [], now=1.0
        )
    chain = store.chain("a", "r3", now=1.0)
    assert chain is not None
    assert [each.id for each in chain] == ["r0", "r1", "r2", "r3"]
    store.delete("a", "r1")
    assert store.chain("a", "r3", now=1.0) is None


def test_a_chain_that_is_too_large_is_refused(opener: Opener) -> None:
    store = opener(4 * MAX_KEPT_LENGTH, DAY)
    store.put(response("r0", size=MAX_KEPT_LENGTH // 2), [], now=1.0)
    store.put(response("r1", size=MAX_KEPT_LENGTH // 2, previous="r0"), [], now=1.0)
    with pytest.raises(TooLong):
        store.chain("a", "r1", now=1.0)
    store.close()


def test_a_chain_that_leads_into_itself_ends(store: SqlBackend) -> None:
    store.put(response("r0", previous="r0"), [], now=1.0)
    with pytest.raises(TooLong):
        store.chain("a", "r0", now=1.0)


def test_what_was_not_used_for_too_long_is_forgotten(store: SqlBackend) -> None:
    store.put(response("old"), [], now=0.0)
    store.put(response("used"), [], now=0.0)
    conversation(store, "c", now=0.0)
    store.chain("a", "used", now=DAY)
    store.put(response("new"), [], now=DAY + 1)
    assert store.get("a", "old") is None
    assert store.conversation("a", "c") is None
    assert store.get("a", "used") is not None


def test_the_tenant_that_has_most_gives_way_and_its_oldest_first(store: SqlBackend) -> None:
    store.put(response("small", "b"), [], now=1.0)
    for number in range(30):
        store.put(response(f"r{number}", "a", size=10_000), [], now=2.0 + number)
    assert store.get("b", "small") is not None
    assert store.get("a", "r0") is None
    assert store.get("a", "r29") is not None
    assert store.get("a", "r24") is not None


def test_what_is_larger_than_all_of_the_store_is_refused(store: SqlBackend) -> None:
    store.put(response("r0"), [], now=1.0)
    with pytest.raises(StoreFull):
        store.put(response("r1", size=200_000), [], now=1.0)
    assert store.get("a", "r0") is not None


def test_a_response_that_is_written_again_counts_once(store: SqlBackend) -> None:
    store.put(response("other", size=30_000), [], now=1.0)
    unfinished = msgspec.structs.replace(response("r1", size=30_000), status="in_progress")
    for number in range(20):
        store.put(unfinished, [], now=1.0 + number)
    assert store.get("a", "other") is not None
    found = store._database.execute("SELECT sum(bytes) FROM tenants").fetchone()
    assert found == (response("r1", size=30_000).size * 2,)


def test_a_finished_response_is_not_written_over(store: SqlBackend) -> None:
    cancelled = msgspec.structs.replace(response("r1"), status="cancelled")
    unfinished = msgspec.structs.replace(response("r1"), status="in_progress")
    store.put(unfinished, [], now=1.0)
    store.put(cancelled, [], now=1.0)
    store.put(response("r1", size=5), [], now=1.0)
    assert store.get("a", "r1") == cancelled


def test_unfinished_responses_are_given_up_by_whoever_makes_them(store: SqlBackend) -> None:
    store.put(response("r1"), [], now=1.0)
    store.put(response("r2"), [], now=1.0)
    assert store.renew("a", ["r1", "r2"], lease=9.0) == set()
    kept = store.get("a", "r1")
    assert kept is not None
    assert kept.lease == 9.0
    store.cancel("a", "r1")
    store.delete("a", "r2")
    assert store.renew("a", ["r1", "r2"], lease=10.0) == {"r1", "r2"}


def test_events_stay_in_order_and_go_with_their_response(store: SqlBackend) -> None:
    unfinished = msgspec.structs.replace(response("r1"), status="in_progress")
    store.put(unfinished, [], now=1.0)
    batches = [EventBatch(first=first, frames=b"x" * 9) for first in (0, 3, 12)]
    for batch in batches:
        store.add_events("a", "r1", batch, now=1.0)
    store.add_events("b", "r1", batches[0], now=1.0)
    for after, found in ((-1, batches), (0, batches), (2, batches[1:]), (11, batches[2:])):
        assert store.events("a", "r1", after) == found
    assert store.events("a", "r1", 99) == batches[2:]
    assert store.events("b", "r1", -1) == []
    (before,) = store._database.execute("SELECT bytes FROM tenants").fetchone()
    store.put(response("r1"), [], now=1.0)
    assert store._database.execute("SELECT bytes FROM tenants").fetchone() == (before,)
    assert before == response("r1").size + 27
    store.delete("a", "r1")
    assert store.events("a", "r1", -1) == []
    assert store._database.execute("SELECT bytes FROM tenants").fetchone() == (0,)


def test_items_of_a_conversation_stay_in_order(store: SqlBackend) -> None:
    assert not store.add_items("a", "c", [], now=1.0)
    conversation(store, "c")
    items = [StoredItem(id=f"i{number}", item=b"{}") for number in range(5)]
    assert store.add_items("a", "c", items[:2], now=1.0)
    assert store.add_items("a", "c", items[2:], now=1.0)
    assert store.items("a", "c", now=1.0) == items
    assert store.items("b", "c", now=1.0) is None
    assert store.delete_item("a", "c", "i1")
    assert not store.delete_item("a", "c", "i1")
    assert store.items("a", "c", now=1.0) == [items[0], *items[2:]]
    assert store.delete_conversation("a", "c")
    assert store.items("a", "c", now=1.0) is None
    conversation(store, "c")
    assert store.items("a", "c", now=1.0) == [], "nothing of the one before"


def test_metadata_of_a_conversation_can_change(store: SqlBackend) -> None:
    conversation(store, "c")
    changed = StoredConversation(id="c", tenant="a", created=5.0, metadata=b'{"a":"b"}')
    store.put_conversation(changed, now=5.0)
    found = store.conversation("a", "c")
    assert found is not None
    assert (found.metadata, found.created) == (b'{"a":"b"}', 1.0)


def test_a_conversation_that_is_too_large_is_refused(opener: Opener) -> None:
    store = opener(4 * MAX_KEPT_LENGTH, DAY)
    conversation(store, "c")
    item = StoredItem(id="i", item=b"x" * (MAX_KEPT_LENGTH // 2))
    store.add_items("a", "c", [item], now=1.0)
    with pytest.raises(TooLong):
        store.add_items("a", "c", [item], now=1.0)
    assert len(store.items("a", "c", now=1.0) or ()) == 1
    store.close()


def _write_until_killed(opener: Opener, told: "multiprocessing.connection.Connection") -> None:
    backend = opener(1 << 30, DAY)
    number = 0
    while True:
        backend.put(response(f"k{number}", size=5_000), [], now=1.0)
        told.send(number)
        number += 1


def test_nothing_that_was_acknowledged_is_lost_with_its_writer(opener: Opener) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    writer = context.Process(target=_write_until_killed, args=(opener, theirs))
    writer.start()
    theirs.close()
    store = opener(1 << 30, DAY)
    acknowledged = -1
    for number in range(200):
        store.put(response(f"m{number}", size=100), [], now=1.0)
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
