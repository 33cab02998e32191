"""The engines known to a front end, and which are considered lost."""

import msgspec

from engine.shared.messages import EngineStats
from engine.shared.scope import Scope
from server.router.members import EngineLost, Members
from tests.server.router.known_engines import (
    MY_INCARNATION,
    entry,
    members_of,
    open_ranks,
    receive_hello,
    stats,
    view,
)


def take_stats(members: Members, of: EngineStats) -> None:
    members.routes[of.rank].stats = of


def test_an_engine_takes_requests_once_ready_and_greeted_in_any_order() -> None:
    members = Members(MY_INCARNATION, 5.0)
    members.take_view(view(1, entry(0, 10, ready=False)), now=0.0)
    assert not members.ready
    receive_hello(members, 0, 10)
    assert not members.ready
    members.take_view(view(2, entry(0, 10)), now=0.0)
    assert members.ready
    assert members.routes[0].identity == b"10"
    assert members.max_model_len == 512


def test_the_greeting_of_a_predecessor_opens_no_route() -> None:
    members = Members(MY_INCARNATION, 5.0)
    receive_hello(members, 0, 9)
    members.take_view(view(1, entry(0, 10)), now=0.0)
    assert open_ranks(members) == []


def test_departed_engine_is_lost_with_its_incarnation() -> None:
    members = members_of(10, 11)
    assert members.take_view(view(2, entry(1, 11)), now=1.0) == [EngineLost(0, 10)]
    assert open_ranks(members) == [1]


def test_only_newer_views_or_other_coordinators_are_accepted() -> None:
    members = members_of(10)
    assert not members.is_newer(view(1))
    assert members.is_newer(view(2))
    assert members.is_newer(view(1, epoch=2))


def test_a_replaced_engine_is_lost_and_its_successor_has_its_own_route() -> None:
    members = members_of(10)
    receive_hello(members, 0, 20)
    assert members.take_view(view(2, entry(0, 20)), now=1.0) == [EngineLost(0, 10)]
    assert members.routes[0].identity == b"20"
    assert members.find(0, 10) is None


def test_prefill_engines_are_known_until_they_leave() -> None:
    members = Members(MY_INCARNATION, 5.0)
    prefill = entry(0, 10)
    assert prefill.setup is not None
    role = msgspec.structs.replace(prefill.setup, kv_role="prefill")
    prefill = msgspec.structs.replace(prefill, setup=role)
    members.take_view(view(1, prefill, entry(1, 11)), now=0.0)
    assert members.has_prefill_engines
    members.take_view(view(1, entry(1, 11), epoch=2), now=1.0)
    assert members.has_prefill_engines, "it has yet to register with the new coordinator"
    for second in range(2, 60):
        members.expire(float(second))
    members.take_view(view(2, entry(1, 11), epoch=2), now=60.0)
    assert not members.has_prefill_engines


def test_routes_are_ordered_by_rank() -> None:
    members = members_of(10, 11)
    members.take_view(view(2, entry(1, 11)), now=1.0)
    receive_hello(members, 0, 20, now=1.0)
    members.take_view(view(3, entry(1, 11), entry(0, 20)), now=1.0)
    assert open_ranks(members) == [0, 1]


def test_unreachable_engine_is_reported_once_until_next_hello() -> None:
    members = members_of(10)
    assert members.mark_unreachable(0, 9) == []
    assert members.mark_unreachable(0, 10) == [EngineLost(0, 10)]
    assert members.mark_unreachable(0, 10) == []
    assert not members.has_engines
    assert members.last_identity((0, 10)) == b"10"
    receive_hello(members, 0, 10)
    assert members.has_engines


def test_loss_reports_exclusive_request_of_engine() -> None:
    members = members_of(10)
    take_stats(members, msgspec.structs.replace(stats(0, 10, 1), exclusive_request=7))
    assert members.died(0, 10) == [EngineLost(0, 10, exclusive_request=7)]


def test_another_connection_of_the_same_process_is_distinguished() -> None:
    members = members_of(10)
    assert not receive_hello(members, 0, 10)
    assert receive_hello(members, 0, 10, session=2)
    assert not receive_hello(members, 0, 20)


def test_an_engine_found_dead_stays_dead_until_it_is_replaced() -> None:
    members = members_of(10)
    assert members.died(0, 10) == [EngineLost(0, 10)]
    assert members.died(0, 10) == []
    assert members.take_view(view(2, entry(0, 10)), now=1.0) == []
    assert not members.ready
    receive_hello(members, 0, 20)
    members.take_view(view(3, entry(0, 20)), now=2.0)
    assert members.ready


def test_empty_view_of_restarted_coordinator_removes_no_engine() -> None:
    members = members_of(10, 11)
    assert members.take_view(view(1, epoch=2), now=1.0) == []
    assert open_ranks(members) == [0, 1]
    assert members.take_view(view(2, entry(0, 10), epoch=2), now=2.0) == []
    assert members.expire(4.0) == []
    assert members.expire(6.5) == [EngineLost(1, 11, was_silent=True)]
    assert open_ranks(members) == [0]


def test_engine_stays_ready_during_coordinator_restart() -> None:
    members = members_of(10)
    registers = entry(0, 10, ready=False)
    assert members.take_view(view(1, registers, entry(1, 11, ready=False), epoch=2), now=1.0) == []
    assert open_ranks(members) == [0]
    assert members.max_model_len == 512
    assert members.view is not None
    assert [each.ready for each in members.view.engines] == [True, False]
    drains = msgspec.structs.replace(registers, draining=True)
    assert members.take_view(view(2, drains, entry(1, 11), epoch=2), now=2.0) == []
    assert open_ranks(members) == []


def test_draining_engine_gets_no_requests_without_coordinator() -> None:
    members = members_of(10, 11)
    receive_hello(members, 0, 10, drains=True)
    assert open_ranks(members) == [1]
    assert members.reaches_engines
    receive_hello(members, 0, 10, now=0.1)
    assert open_ranks(members) == [1], "a hello that was under way does not take it back"
    listed = (entry(0, 10), entry(1, 11))
    assert members.take_view(view(1, *listed, epoch=2), now=1.0) == []
    assert open_ranks(members) == [1], "a new coordinator hears of it later"
    assert members.view is not None
    assert [(each.ready, each.draining) for each in members.view.engines] == [
        (False, True), (True, False),
    ]  # fmt: skip
    receive_hello(members, 0, 20, now=2.0)
    members.take_view(view(2, entry(0, 20), entry(1, 11), epoch=2), now=2.0)
    assert open_ranks(members) == [0, 1], "its successor does not drain"


def test_active_engine_is_kept_until_new_coordinator_lists_it() -> None:
    members = members_of(10)
    for now in (1.0, 3.0, 5.0, 7.0, 9.0):
        assert members.take_view(view(int(now), epoch=2), now) == []
        assert members.expire(now) == []
        receive_hello(members, 0, 10, now=now)
    assert open_ranks(members) == [0]
    assert members.expire(11.0) == members.expire(13.0) == []
    assert members.expire(14.5) == [EngineLost(0, 10, was_silent=True)]


def test_stalled_front_end_reads_pending_views_before_expiring_engines() -> None:
    members = members_of(10)
    members.take_view(view(1, epoch=2), now=1.0)
    assert members.take_view(view(2, epoch=2), now=60.0) == []
    assert members.expire(60.0) == []
    assert members.take_view(view(3, entry(0, 10), epoch=2), now=60.1) == []
    assert open_ranks(members) == [0]


def test_a_successor_is_not_ready_because_its_predecessor_was() -> None:
    members = members_of(10)
    receive_hello(members, 0, 20)
    lost = members.take_view(view(1, entry(0, 20, ready=False), epoch=2), now=1.0)
    assert lost == [EngineLost(0, 10)]
    assert not members.ready


def test_paused_state_requires_no_contradicting_stats() -> None:
    members = members_of(10)
    assert members.paused
    take_stats(members, stats(0, 10, 1, running=1))
    assert not members.paused
    take_stats(members, stats(0, 10, 2))
    assert members.paused
    members.take_view(view(2, entry(0, 10), running=True), now=2.0)
    assert not members.paused


def test_engines_out_of_scope_are_ignored() -> None:
    members = Members(MY_INCARNATION, 5.0, Scope(rank=1))
    for rank in (0, 1):
        receive_hello(members, rank, rank + 10)
    members.take_view(view(1, entry(0, 10), entry(1, 11)), now=0.0)
    assert open_ranks(members) == [1]
    assert members.view is not None
    assert [each.rank for each in members.view.engines] == [1]
    assert members.take_view(view(2, entry(1, 11)), now=0.1) == []
    assert members.take_view(view(3, entry(0, 10)), now=0.2) == [EngineLost(1, 11)]
    assert not members.ready


def test_silent_engine_is_unreachable_until_next_hello() -> None:
    members = members_of(10, 11)
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        assert members.find_silent(now) == []
        receive_hello(members, 1, 11, now=now)
    assert members.find_silent(6.0) == [EngineLost(0, 10, was_silent=True)]
    assert open_ranks(members) == [1]
    assert members.find_silent(6.5) == []
    receive_hello(members, 0, 10, now=7.0)
    assert open_ranks(members) == [0, 1]


def test_stalled_front_end_considers_no_engine_silent() -> None:
    members = members_of(10)
    members.find_silent(1.0)
    assert members.find_silent(30.0) == []
    assert members.find_silent(31.0) == []
