"""An engine's wave state: next actions, reports, and effects of gathers."""

from typing import Any

import pytest

from engine.lockstep.wave import (
    START_REPEAT_INTERVAL,
    EngineWave,
    Gather,
    GatherRow,
    Land,
    LockstepError,
    Park,
    Phase,
    Step,
    judge,
)
from engine.scheduler.admission import RankState
from engine.shared.messages import StartDpWave, StartWave, WaveComplete

IDLE = RankState(*[0] * len(RankState._fields))
BUSY = RankState(*range(5, 5 + len(RankState._fields)))


def row(**changes: Any) -> GatherRow:
    start = GatherRow(topology=0, tag=0, step=0, wave=0, hold_epoch=0, has_work=0, load=IDLE)
    return start._replace(**changes)


def asked(wave: EngineWave, has_work: bool = False, load: RankState = IDLE) -> GatherRow:
    action = wave.next_action(has_work, load)
    assert isinstance(action, Gather), action
    return action.row


def gather(
    engine: EngineWave, *, has_work: bool = False, peer_works: int = 0, **of_peer: Any
) -> None:
    """Run a gather with one peer that is in the same wave state."""
    own = asked(engine, has_work)
    engine.gathered([own.pack(), own._replace(has_work=peer_works, **of_peer).pack()])


def take_step(wave: EngineWave) -> None:
    wave.launched()
    assert wave.next_action(False, IDLE) == Land(drains=True)
    wave.landed()


def paused(rank: int = 0, gather_interval: int = 1) -> EngineWave:
    """An engine whose group of two has been formed; it is paused in wave 1."""
    wave = EngineWave(rank=rank, incarnation=7, gather_interval=gather_interval)
    gather(wave)
    wave.take_reports()
    assert (wave.phase, wave.wave) == (Phase.PAUSED, 1)
    return wave


def running(rank: int = 0, gather_interval: int = 1) -> EngineWave:
    wave = paused(rank, gather_interval)
    assert asked(wave, has_work=True)
    wave.take_reports()
    return wave


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["topology", "tag", "step"])
def test_ranks_in_different_states_are_an_error_naming_both(name: str) -> None:
    wave = EngineWave(rank=0, incarnation=1)
    own = asked(wave)
    with pytest.raises(LockstepError, match=rf"rank 0 is at {name} 0 but rank 1 at 5"):
        wave.gathered([own.pack(), row(**{name: 5}).pack()])


@pytest.mark.parametrize(
    ("rows", "phase"),
    [
        ([row(), row()], Phase.PAUSED),
        ([row(), row(has_work=1)], Phase.RUNNING),
        ([row(hold_epoch=1), row(has_work=1)], Phase.HELD),
        ([row(hold_epoch=1), row(hold_epoch=2, has_work=1)], Phase.RUNNING),
        ([row(hold_epoch=3), row(hold_epoch=2)], Phase.HELD),
    ],
)
def test_group_decision_follows_from_gathered_rows(rows: list[GatherRow], phase: Phase) -> None:
    assert judge(rows).phase is phase
    assert judge(rows[::-1]) == judge(rows), "whoever says it"


# -- starting ------------------------------------------------------------------------------------


def test_a_new_group_gathers_first_and_takes_the_largest_wave() -> None:
    wave = EngineWave(rank=0, incarnation=7, wave=3)
    gather(wave, wave=11)
    assert (wave.phase, wave.wave) == (Phase.PAUSED, 12)
    assert wave.take_reports() == [WaveComplete(0, 7, 11)]


def test_welcome_of_restarted_coordinator_advances_wave_without_starting() -> None:
    wave = paused()
    wave.welcomed(9)
    wave.welcomed(2)
    assert wave.wave == 9
    assert wave.next_action(False, IDLE) == Park()


def test_a_request_that_was_aborted_in_the_same_drain_starts_nothing() -> None:
    wave = paused()
    wave.request_received(1)
    assert wave.next_action(False, IDLE) == Park()


def test_an_order_of_an_earlier_wave_or_another_topology_starts_nothing() -> None:
    wave = paused()
    wave.start_ordered(StartDpWave(0, -1))
    wave.start_ordered(StartDpWave(9, -1, 0, 5))
    assert wave.next_action(False, IDLE) == Park()
    assert wave.wave == 1


def test_the_excluded_engine_waits_for_its_request() -> None:
    wave = paused(rank=1)
    wave.start_ordered(StartDpWave(1, 1))
    assert wave.next_action(False, IDLE) == Park()


def test_engine_without_peers_repeats_its_request() -> None:
    wave = running(rank=1)
    wave.tick(10.0)
    wave.tick(10.0 + START_REPEAT_INTERVAL / 2)
    assert wave.take_reports() == []
    wave.tick(10.0 + START_REPEAT_INTERVAL)
    assert wave.take_reports() == [StartWave(1, 7, 1)]
    gather(wave, has_work=True)
    wave.tick(20.0)
    wave.tick(30.0)
    assert wave.take_reports() == []


# -- stepping ------------------------------------------------------------------------------------


def test_a_step_carries_the_loads_of_all_ranks() -> None:
    wave = running()
    own = asked(wave, has_work=True, load=BUSY)
    wave.gathered([own.pack(), own._replace(load=IDLE).pack()])
    action = wave.next_action(True, BUSY)
    assert isinstance(action, Step)
    assert action.loads == (BUSY, IDLE)


def test_steps_between_gathers_carry_no_loads() -> None:
    wave = running(gather_interval=3)
    gather(wave, has_work=True)
    for number in range(3):
        action = wave.next_action(True, IDLE)
        assert isinstance(action, Step)
        assert (action.number, bool(action.loads)) == (number, number == 0)
        take_step(wave)
    assert asked(wave).step == 3


# -- stopping ------------------------------------------------------------------------------------


def test_larger_wave_is_adopted_and_reported_while_running() -> None:
    wave = running(rank=1)
    gather(wave, has_work=True, wave=40)
    assert wave.wave == 40
    assert wave.take_reports() == [StartWave(1, 7, 40)]


# -- groups that are lost --------------------------------------------------------------------------


def test_new_group_forms_after_abandoned_step() -> None:
    wave = running(rank=1)
    wave.group_lost()
    assert wave.next_action(True, BUSY) == Park()
    wave.regroup(topology=2, is_leader=True, gather_interval=4)
    row = asked(wave, has_work=True)
    assert (row.topology, row.tag, row.step) == (2, 0, 0)
    gather(wave, has_work=True)
    assert wave.running
    gather_due = [isinstance(wave.next_action(True, BUSY), Gather)]
    for _ in range(5):
        take_step(wave)
        gather_due.append(isinstance(wave.next_action(True, BUSY), Gather))
    assert gather_due == [False, False, False, False, True, False]


def test_the_leader_reports_the_end_of_waves() -> None:
    for rank, is_leader in ((0, False), (2, True)):
        wave = EngineWave(rank=rank, incarnation=7, phase=Phase.APART)
        wave.regroup(1, is_leader=is_leader)
        gather(wave)
        ends = [report for report in wave.take_reports() if isinstance(report, WaveComplete)]
        assert [report.rank for report in ends] == ([rank] if is_leader else [])


# -- steps that overlap ----------------------------------------------------------------------------


def overlapped(rank: int = 0) -> EngineWave:
    """An engine in a wave that has just begun, which may have two steps in flight."""
    wave = EngineWave(rank=rank, incarnation=7, max_in_flight=2)
    gather(wave, has_work=True)
    wave.take_reports()
    return wave


def test_next_step_is_gathered_and_launched_during_running_step() -> None:
    wave = overlapped()
    done: list[str] = []
    for _ in range(8):
        action = wave.next_action(True, IDLE)
        done.append(type(action).__name__)
        match action:
            case Gather():
                gather(wave, has_work=True)
            case Step():
                wave.launched()
            case Land(drains):
                assert drains
                wave.landed()
    assert done == ["Step", "Gather", "Step", "Land", "Gather", "Step", "Land", "Gather"]
