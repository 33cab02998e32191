"""The load of each engine counts every sent request exactly once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.shared.messages import Received
from engine.shared.scope import EVERYTHING, Scope
from server.router.load import Loads
from server.router.load_table import LoadTable, Sent, create_load_table
from server.router.members import EngineLost, Members
from server.router.routing import EngineLoad, LeastLoaded
from tests.server.router.known_engines import (
    ME,
    MY_INCARNATION,
    Known,
    entry,
    stats,
    view,
)


def test_a_burst_is_counted_before_any_stats_show_it() -> None:
    known = Known(10, 11)
    policy = LeastLoaded()
    for _ in range(100):
        known.sent(policy.choose(known.all()).rank, prompt_tokens=7)
    assert known.requests() == [50, 50]
    assert [load.prefill_tokens for load in known.all()] == [350, 350]


def test_sends_of_predecessor_front_end_are_not_counted() -> None:
    known = Known(10)
    known.sent(0, prompt_tokens=10)
    predecessor = Received(ME, MY_INCARNATION - 1, requests=99, prompt_tokens=990)
    known.observe(stats(0, 10, 1, received=(predecessor,)), now=1.0)
    assert known.requests() == [1]


def test_older_stats_are_ignored_from_any_source() -> None:
    known = Known(10)
    known.observe(stats(0, 10, 5, running=2), now=1.0)
    known.observe(stats(0, 10, 4, running=9), now=2.0)
    assert known.requests() == [2]
    assert known.members.stats_age(3.0) == {0: 2.0}


def test_silent_engine_returns_with_its_route_and_counts() -> None:
    known = Known(10)
    for _ in range(5):
        known.sent(0, prompt_tokens=10)
    assert known.members.take_view(view(2), now=1.0) == [EngineLost(0, 10)]
    known.members.take_view(view(3, entry(0, 10)), now=2.0)
    assert known.members.routes[0].identity == b"10"
    known.sent(0, prompt_tokens=10)
    seen = Received(ME, MY_INCARNATION, requests=5, prompt_tokens=50)
    known.observe(stats(0, 10, 9, received=(seen,)), now=3.0)
    assert known.requests() == [1]


def test_front_ends_of_one_node_see_each_others_unreceived_sends(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    create_load_table(path, num_front_ends=2)
    tables = [LoadTable(path, 0), LoadTable(path, 1)]
    mine = Known(10, table=tables[0])
    peer = Known(10, table=tables[1], front_end=(1, 600))
    for _ in range(4):
        peer.sent(0, prompt_tokens=3)
    assert mine.requests() == [4]
    seen = Received(1, 600, requests=3, prompt_tokens=9)
    mine.observe(stats(0, 10, 1, running=3, received=(seen,)), now=1.0)
    assert mine.requests() == [3 + 1]
    tables[1].publish(0, Sent(601, 10, 3, 9))
    assert mine.requests() == [3 + 3], "of the peer's successor, nothing has been received"
    mine.members.take_view(view(2, entry(0, 20)), now=2.0)
    assert mine.requests() == [0], "sends to the predecessor are not on their way to this one"
    for table in tables:
        table.close()


@given(st.lists(st.integers(min_value=0, max_value=3), min_size=1, max_size=60), st.data())
def test_load_is_exact_for_any_received_count(sends: list[int], data: st.DataObject) -> None:
    known = Known(10, 11, 12, 13)
    sent = [0, 0, 0, 0]
    running = [0, 0, 0, 0]
    for version, rank in enumerate(sends, start=1):
        known.sent(rank, prompt_tokens=1)
        sent[rank] += 1
        running[rank] = data.draw(st.integers(min_value=running[rank], max_value=sent[rank]))
        seen = Received(ME, MY_INCARNATION, running[rank], running[rank])
        report = stats(rank, 10 + rank, version, running=running[rank], received=(seen,))
        known.observe(report, now=0.0)
        assert known.requests() == sent
        unreceived = [all_ - seen for all_, seen in zip(sent, running, strict=True)]
        assert [load.prefill_tokens for load in known.all()] == unreceived


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_ties_rotate_only_within_the_tied_tier(count: int) -> None:
    known = Known(*range(10, 10 + count + 1))
    for _ in range(3):
        known.sent(0, prompt_tokens=1)
    policy = LeastLoaded()
    chosen = [policy.choose(known.all()) for _ in range(2 * count)]
    assert sorted(choice.rank for choice in chosen) == sorted(2 * list(range(1, count + 1)))


def test_front_ends_missing_in_table_are_on_other_nodes(tmp_path: Path) -> None:
    create_load_table(tmp_path / "loads", 2)
    of_two = Loads(ME, MY_INCARNATION, 5.0, LoadTable(tmp_path / "loads", 0))
    alone = Loads(ME, MY_INCARNATION, 5.0, None)
    near, unseen = Scope(node="a"), []
    for scope, loads in ((EVERYTHING, of_two), (EVERYTHING, alone), (near, alone)):
        members = Members(MY_INCARNATION, 5.0, scope)
        assert members.unseen_front_ends(loads.num_front_ends) == 0, "before the first view"
        members.take_view(view(1, num_front_ends=6), now=0.0)
        unseen.append(members.unseen_front_ends(loads.num_front_ends))
    assert unseen == [4, 5, 0]


def test_failed_sends_are_not_counted() -> None:
    known = Known(10)
    known.sent(0, prompt_tokens=7)
    known.loads.send_failed(known.members.routes[0], prompt_tokens=7)
    assert known.all() == [EngineLoad(0, 0, 0, 0, 0.0)]
    seen = Received(ME, MY_INCARNATION, requests=0, prompt_tokens=0)
    for version in range(1, 20):
        assert not known.observe(stats(0, 10, version, received=(seen,)), float(version))


def test_missing_and_repeated_messages_are_detected() -> None:
    known = Known(10)

    def arrived(outputs: int) -> int:
        seen = Received(ME, MY_INCARNATION, requests=0, prompt_tokens=0, outputs=outputs)
        arrived = stats(0, 10, outputs, received=(seen,))
        return known.loads.outputs_arrived(known.members.routes[0], arrived)

    assert [arrived(1), arrived(2), arrived(2), arrived(4), arrived(3), arrived(5)] == [
        0, 0, -1, 1, -2, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["request", "outputs"])
def test_messages_missing_for_grace_period_are_lost(what: str) -> None:
    known = Known(10)
    known.sent(0, 8)
    requests, outputs = (0, 0) if what == "request" else (1, 1)
    for version, now in enumerate((1.0, 3.0, 5.9)):
        seen = Received(ME, MY_INCARNATION, requests, 8 * requests, outputs)
        assert not known.observe(stats(0, 10, version + 1, received=(seen,)), now)
    assert known.observe(stats(0, 10, 9, received=(seen,)), 6.1)
    known.loads.forget_unreceived(known.members.routes[0])
    assert [load.requests for load in known.all()] == [0]


def test_late_messages_do_not_count_against_later_requests() -> None:
    known = Known(10)
    known.sent(0, 8)
    known.loads.forget_unreceived(known.members.routes[0])
    late = Received(ME, MY_INCARNATION, requests=1, prompt_tokens=8)
    known.observe(stats(0, 10, 1, received=(late,)), 1.0)
    known.sent(0, 8)
    assert [load.requests for load in known.all()] == [1]
