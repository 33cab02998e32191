"""How the coordinator follows a lockstep group, and how it wakes it."""

import pytest

from coordinator.events import FromMember, PublishOrder, PublishView, Tick
from coordinator.state import CoordinatorParameters, CoordinatorState
from coordinator.wave import NEVER, ORDER_INTERVAL, IndependentWave, LockstepWave
from engine.shared.messages import (
    EngineSetup,
    EngineStats,
    Hello,
    Ready,
    StartDpWave,
    StartWave,
    WakeUp,
    WaveComplete,
)
from engine.shared.version import PROTOCOL_VERSION


def stats(
    rank: int, wave: int, *, runs: bool, hold_epoch: int = 0, topology: int = 0
) -> EngineStats:
    return EngineStats(
        rank=rank, incarnation=1, version=1, wave=wave, step=0, waiting=0, running=0,
        kv_usage=0.0, queued_prefill_tokens=0, wave_running=runs, hold_epoch=hold_epoch,
        topology=topology,
    )  # fmt: skip


@pytest.fixture
def wave() -> LockstepWave:
    """Of a group of three, paused in wave 5."""
    made = LockstepWave()
    made.take_members(frozenset({0, 1, 2}))
    made.report(WaveComplete(0, 1, 4))
    assert (made.wave, made.running, made.orders(0.0)) == (5, False, [])
    return made


def start(wave: LockstepWave, rank: int, number: int = 5) -> bool:
    return wave.report(StartWave(rank, 1, number))


# -- evidence ------------------------------------------------------------------------------------


def test_stats_count_as_wave_reports(wave: LockstepWave) -> None:
    assert wave.stats(stats(0, 5, runs=True))
    assert wave.running
    assert not wave.stats(stats(1, 5, runs=False)), "rank 1 has not come yet"
    assert wave.running
    assert wave.stats(stats(1, 6, runs=False)), "it has come and gone"
    assert (wave.wave, wave.running) == (6, False)


def test_new_topology_is_accepted_with_lower_wave(wave: LockstepWave) -> None:
    start(wave, 2, 9)
    assert not wave.report(StartWave(1, 1, 7))
    wave.report(StartWave(1, 1, 7, 0, 1))
    assert (wave.wave, wave.running) == (9, True), "the number itself never goes back"
    (order,) = wave.orders(1.0)
    assert (order.wave, order.topology) == (9, 1)


def test_departed_member_keeps_no_wave_running(wave: LockstepWave) -> None:
    start(wave, 2)
    wave.take_members(frozenset({0, 1}))
    assert not wave.running


# -- orders --------------------------------------------------------------------------------------


def test_wake_up_notice_wakes_all_engines_except_recipient_of_request(wave: LockstepWave) -> None:
    assert wave.notice(WakeUp(0, 1, 5))
    assert wave.orders(1.0) == [StartDpWave(5, 1)]
    assert not wave.running
    assert not wave.notice(WakeUp(1, 2, 5)), "they are being woken"
    assert wave.orders(1.0) == []
    assert wave.orders(1.0 + ORDER_INTERVAL) == [StartDpWave(5, -1)]


def test_held_group_is_woken_only_by_resume(wave: LockstepWave) -> None:
    wave.report(StartWave(0, 1, 5, 1))
    wave.report(WaveComplete(0, 1, 5, 1))
    assert not wave.notice(WakeUp(0, 1, 6))
    assert wave.orders(1.0) == []
    wave.report(StartWave(1, 1, 6, 2))
    assert wave.orders(1.0) == [StartDpWave(6, 1, 2)]


def test_hold_ends_with_its_group(wave: LockstepWave) -> None:
    wave.report(StartWave(0, 1, 5, 1))
    wave.report(WaveComplete(0, 1, 5, 1))
    wave.take_members(frozenset())
    wave.take_members(frozenset({0, 1}))
    assert wave.notice(WakeUp(0, 1, 6))
    assert wave.orders(1.0) == [StartDpWave(6, 1, 0)]


def test_rank_joining_running_group_is_started(wave: LockstepWave) -> None:
    for rank in range(3):
        start(wave, rank)
    assert wave.orders(1.0) == []
    wave.take_members(frozenset({0, 1, 2, 3}))
    assert wave.orders(1.0) == [StartDpWave(5, -1)]


def test_wake_ups_are_counted_by_their_first_cause(wave: LockstepWave) -> None:
    wave.notice(WakeUp(0, 1, 5))
    wave.orders(1.0)
    start(wave, 1)
    assert wave.wakeups == {"front_end": 1, "engine": 0}
    wave.report(WaveComplete(0, 1, 5))
    start(wave, 1, 6)
    assert wave.wakeups == {"front_end": 1, "engine": 1}


def test_a_wave_that_all_engines_start_by_themselves_is_counted_once(wave: LockstepWave) -> None:
    for number in range(5, 26):
        for rank in range(3):
            start(wave, rank, number)
        wave.notice(WakeUp(0, 1, number))  # late: it runs
        wave.report(WaveComplete(0, 1, number))
    assert sum(wave.wakeups.values()) == 21


# -- independent engines -------------------------------------------------------------------------


def of_step(step: int, running: int) -> EngineStats:
    return EngineStats(
        rank=0, incarnation=1, version=step, wave=0, step=step, waiting=0, running=running,
        kv_usage=0.0, queued_prefill_tokens=0,
    )  # fmt: skip


@pytest.mark.parametrize("order", ["notice, stats", "stats, notice", "notices, stats", "one step"])
def test_each_wake_up_counts_once_for_any_order_of_messages(order: str) -> None:
    wave = IndependentWave()
    wave.stats(of_step(7, 0))
    for number in range(21):
        step = 8 + 2 * number
        if order.startswith("notice"):
            for _ in range(1 + order.startswith("notices")):
                wave.notice(WakeUp(0, 0, wave.wave))
        if order != "one step":
            wave.stats(of_step(step, 1))
        if order == "stats, notice":
            wave.notice(WakeUp(0, 0, wave.wave))
        wave.stats(of_step(step + 1, 0))
        wave.stats(of_step(step + 1, 0))
        assert (wave.wave, wave.running) == (number + 1, False)
    assert wave.wakeups == {"front_end": 21, "engine": 0}


def busy(rank: int, requests: int) -> EngineStats:
    return EngineStats(rank, 1, 1, 0, 0, 0, requests, 0.0, 0)


def test_orders_are_not_repeated_to_independent_engines() -> None:
    wave = IndependentWave()
    wave.take_members(frozenset({0, 1}))
    assert wave.notice(WakeUp(0, 1, 0))
    assert wave.orders(0.0) == [StartDpWave(0, 1)]
    assert (wave.orders(9.0), wave.orders_due) == ([], NEVER)


def test_the_wave_of_independent_engines_counts_how_often_all_were_idle() -> None:
    wave = IndependentWave()
    assert wave.stats(busy(0, 1))
    assert not wave.stats(busy(1, 1))
    assert not wave.stats(busy(0, 0))
    assert wave.stats(busy(1, 0))
    assert (wave.wave, wave.running) == (1, False)


# -- in the coordinator's state ------------------------------------------------------------------


def lockstep_cluster() -> CoordinatorState:
    """A coordinator with two ready engines of a lockstep group."""
    state = CoordinatorState(
        CoordinatorParameters(
            epoch=1, front_publish="", back_publish="", back_output="",
            publish_interval=0.1, publish_idle_interval=3.0, member_timeout=5.0,
        )
    )  # fmt: skip
    for rank in range(2):
        hello = Hello(
            "engine", rank, 10 + rank, "", 0, {"lockstep": "true"}, protocol=PROTOCOL_VERSION
        )
        state.handle(FromMember(b"", hello), 0.0)
        ready = Ready("engine", rank, 10 + rank, EngineSetup(1, 1, 1, ""))
        state.handle(FromMember(b"", ready), 0.0)
    return state


def test_deadline_includes_next_repetition_of_order() -> None:
    state = lockstep_cluster()
    state.handle(StartWave(1, 11, 3), 1.0)
    due = state.next_deadline(1.0)
    assert due == 1.0 + ORDER_INTERVAL
    assert PublishOrder(StartDpWave(3, -1)) in state.handle(Tick(), due)
    state.handle(StartWave(0, 10, 3), due)
    assert state.next_deadline(due) > due + ORDER_INTERVAL


def test_start_and_end_of_wave_are_published_immediately() -> None:
    state = lockstep_cluster()
    for report, expected in (
        (StartWave(1, 11, 3), (3, True)),
        (WaveComplete(0, 10, 3), (4, False)),
    ):
        views = [a.view for a in state.handle(report, 1.0) if isinstance(a, PublishView)]
        assert [(view.wave, view.running) for view in views] == [expected]


def test_reports_of_non_members_are_ignored() -> None:
    state = lockstep_cluster()
    state.handle(StartWave(1, 99, 3), 1.0)
    assert (state.view().wave, state.view().running) == (0, False)
