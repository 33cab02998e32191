"""What front ends are told of a view that they know in part, and what they make of it."""

from random import Random

import pytest
from msgspec.structs import replace

from coordinator.publication import FULL_ENTRIES_PER_CHANGE, ViewChanges
from engine.shared.messages import (
    ClusterView,
    EngineCounters,
    EngineEntry,
    EngineSetup,
    EngineStats,
    LoadChange,
    ProcessEntry,
    Received,
    ViewChange,
    encode,
)
from server.router.followed_view import REQUEST_INTERVAL, FollowedView

SETUP = EngineSetup(100, 16, 512, "abc")


def stats(rank: int, version: int, **changes: object) -> EngineStats:
    fields = {
        "rank": rank, "incarnation": 10 + rank, "version": version, "wave": 0, "step": version,
        "waiting": version % 3, "running": version % 5, "kv_usage": version / 1000,
        "queued_prefill_tokens": version, "received": [Received(0, 70, 0, 0, version)],
        "counters": EngineCounters(generation_tokens=version), **changes,
    }  # fmt: skip
    return EngineStats(**fields)  # type: ignore[arg-type]


def entry(rank: int, version: int, **changes: object) -> EngineEntry:
    return EngineEntry(rank, 10 + rank, True, "h", 0, SETUP, stats(rank, version, **changes))


def process(name: str) -> ProcessEntry:
    return ProcessEntry(name, "h", "1", 4, None)


def view(number: int, *engines: EngineEntry, names: tuple[str, ...] = ("api 0",)) -> ClusterView:
    processes = [process(name) for name in names]
    return ClusterView(1, number, number, True, [*engines], 1, processes=processes)


def change(changes: ViewChanges, new: ClusterView) -> ViewChange:
    found = changes.since(new)
    assert found is not None
    return found


def test_changes_contain_load_of_most_engines_and_full_entries_in_rotation() -> None:
    number = 3 * FULL_ENTRIES_PER_CHANGE
    changes, followed = ViewChanges(), FollowedView(0.0)
    whole = view(1, *(entry(rank, 1) for rank in range(number)))
    changes.record_full(whole)
    followed.take(whole)
    new = view(2, *(entry(rank, 2) for rank in range(number)))
    found = change(changes, new)
    assert len(found.view.engines) == FULL_ENTRIES_PER_CHANGE
    assert len(found.loads) == number - FULL_ENTRIES_PER_CHANGE
    assert len(encode(found)) < len(encode(new)) / 2
    shown = followed.take(found)
    assert shown is not None
    for rank, known in enumerate(shown.engines):
        assert known.stats is not None
        assert known.stats.queued_prefill_tokens == 2
        assert known.stats.counters.generation_tokens == (
            2 if rank < FULL_ENTRIES_PER_CHANGE else 1
        )
    # Nothing else happens: what is left is told all the same, and then nothing is due any more.
    for version in (3, 4):
        assert changes.partly_sent
        shown = followed.take(change(changes, replace(new, version=version)))
    assert not changes.partly_sent
    assert shown == replace(new, version=4)


def test_received_counts_of_front_ends_are_published_immediately() -> None:
    number = FULL_ENTRIES_PER_CHANGE + 2
    changes, followed = ViewChanges(), FollowedView(0.0)
    whole = view(1, *(entry(rank, 1) for rank in range(number)))
    changes.record_full(whole)
    followed.take(whole)
    got = [Received(0, 70, 1, 40, 2)]
    last = number - 1
    engines = [*(entry(rank, 2) for rank in range(last)), entry(last, 2, received=got)]
    shown = followed.take(change(changes, view(2, *engines)))
    assert shown is not None
    newest = shown.engines[last].stats
    assert newest is not None
    assert newest.received == got
    assert newest.counters.generation_tokens == 1


@pytest.mark.parametrize(
    "news",
    [
        {"halted": True}, {"exclusive_request": 7}, {"hands_over": True}, {"weight_version": "400"},
        {"sleep_level": 1}, {"topology": 2}, {"received": []},
        {"received": [Received(0, 71, 0, 0, 1)]},
    ],
)  # fmt: skip
def test_changes_that_affect_routing_are_published_immediately(news: dict[str, object]) -> None:
    number = FULL_ENTRIES_PER_CHANGE + 5
    changes, last = ViewChanges(), FULL_ENTRIES_PER_CHANGE + 4
    changes.record_full(view(1, *(entry(rank, 1) for rank in range(number))))
    new = [*(entry(rank, 2) for rank in range(last)), entry(last, 2, **news)]
    found = change(changes, view(2, *new))
    assert new[last] in found.view.engines
    assert last not in {each.rank for each in found.loads}


def test_merged_views_equal_those_of_coordinator() -> None:
    random = Random(1)
    changes, followed = ViewChanges(), FollowedView(0.0)
    engines = {rank: entry(rank, 1) for rank in range(150)}
    names = {"api 0"}
    first = view(1, *engines.values())
    changes.record_full(first)
    followed.take(first)
    for number in range(2, 60):
        for rank in random.sample(range(160), 100):
            match random.randrange(20):
                case 0:
                    engines.pop(rank, None)
                case 1:
                    engines[rank] = replace(entry(rank, number), incarnation=number)
                case 2:
                    engines[rank] = replace(entry(rank, number), ready=False, stats=None)
                case 3:
                    names ^= {f"api {rank}"}
                case _ if rank in engines:
                    sent = [Received(0, 70, random.randrange(2), 5, number)]
                    engines[rank] = entry(rank, number, received=sent)
        new = view(number, *(engines[rank] for rank in sorted(engines)), names=tuple(names))
        shown = followed.take(change(changes, new))
        assert shown is not None
        assert [loads(each) for each in shown.engines] == [loads(each) for each in new.engines]
        assert {each.name for each in shown.processes} == names
    while changes.partly_sent:
        new = replace(new, version=new.version + 1)
        shown = followed.take(change(changes, new))
    assert shown is not None
    assert shown.engines == new.engines


def loads(each: EngineEntry) -> object:
    """Return what routing reads of an engine."""
    known = each.stats
    if known is None:
        return each
    sent = [(one.requests, one.prompt_tokens) for one in known.received]
    return replace(each, stats=None), known.version, known.running, known.waiting, sent


def test_after_a_missed_change_a_full_view_is_requested_and_followed() -> None:
    changes, followed = ViewChanges(), FollowedView(0.0)
    assert changes.since(view(1)) is None, "nobody knows anything"
    first = view(1, entry(0, 1))
    changes.record_full(first)
    followed.take(first)
    change(changes, view(2, entry(0, 2)))  # is lost
    later = change(changes, view(3, entry(0, 3)))
    assert followed.take(later) is None
    assert not followed.should_request(REQUEST_INTERVAL / 2), "a whole one was asked for just now"
    assert followed.should_request(REQUEST_INTERVAL)
    assert not followed.should_request(1.5 * REQUEST_INTERVAL)
    whole = view(4, entry(0, 4))
    changes.record_full(whole)
    assert followed.take(whole) is whole
    assert not followed.should_request(9 * REQUEST_INTERVAL)
    assert followed.take(change(changes, view(5, entry(0, 5)))) is not None


def test_changes_of_another_coordinator_and_repeated_ones_change_nothing() -> None:
    changes, followed = ViewChanges(), FollowedView(0.0)
    first = view(1, entry(0, 1))
    changes.record_full(first)
    followed.take(first)
    found = change(changes, view(2, entry(0, 2)))
    assert followed.take(found) is not None
    assert followed.take(found) is None
    assert not followed.should_request(REQUEST_INTERVAL)
    assert followed.take(replace(found, after=2, view=replace(found.view, epoch=2))) is None
    assert followed.should_request(REQUEST_INTERVAL)


def test_load_of_unknown_engine_counts_as_gap() -> None:
    followed = FollowedView(0.0)
    followed.take(view(1))
    load = LoadChange(0, 2, 0, 2, 0, 1, 0.0, 0, [])
    assert followed.take(ViewChange(1, view(2), [load], [], [])) is None
    assert followed.should_request(REQUEST_INTERVAL)
