"""The explorer finds bugs: each of these protocols has one, and is detected.

Every mutant is the production machine with one rule broken, explored in the smallest configuration
in which that rule matters; the original machine passes there.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordinator.wave import Clock, LockstepWave
from engine.lockstep.wave import (
    Action,
    EngineWave,
    Gather,
    GatherRow,
    Land,
    Park,
    Phase,
    Verdict,
    is_hold,
    judge,
)
from engine.scheduler.admission import RankState
from engine.shared.messages import StartDpWave, StartWave, WakeUp, WaveComplete
from tests.protocol.explorer import explore
from tests.protocol.situation import Call, Setup
from tests.protocol.world import World

RESUME = Call("resume", 2)


# -- the coordinator -----------------------------------------------------------------------------


class RunningByOrder(LockstepWave):
    """Assumes that the group runs because it was ordered to."""

    def notice(self, notice: WakeUp) -> bool:
        news = super().notice(notice)
        if news:
            self._started = set(self._members)
        return news

    def orders(self, now: float) -> list[StartDpWave]:
        if self._order_at < 0:
            self._order_at = now
            return [StartDpWave(self.wave, self._excluded_rank, self._hold_epoch)]
        return super().orders(now)


class OrderOnce(LockstepWave):
    """Sends each order once, and trusts that it arrives."""

    def orders(self, now: float) -> list[StartDpWave]:
        return super().orders(now) if self._order_at < 0 else []

    @property
    def orders_due(self) -> float:
        return float("inf")


class OneStarterIsEnough(LockstepWave):
    """Treats the first running engine as the whole group."""

    def _needs_order(self) -> bool:
        return len(self._started) < 2 if self.running else super()._needs_order()


class CompletesAnyWave(LockstepWave):
    """Treats every wave_complete as the end of the current wave."""

    def report(self, report: StartWave | WaveComplete) -> bool:
        news = super().report(report)
        if isinstance(report, WaveComplete):
            self._started = set()
        return news


class FollowsTheLastReport(LockstepWave):
    """Adopts the wave of whichever report came last."""

    def report(self, report: StartWave | WaveComplete) -> bool:
        ended = isinstance(report, WaveComplete)
        self.wave = report.wave + ended
        self._clock = Clock(report.topology, report.wave + ended)
        return super().report(report)


class WakesForOldNotices(LockstepWave):
    """Wakes the group for a request that an earlier wave has long answered."""

    def notice(self, notice: WakeUp) -> bool:
        return super().notice(WakeUp(notice.front_end, notice.rank, self.wave))


class ForgetsHolds(LockstepWave):
    """Ignores that a group is held. Held engines know it themselves, so this is harmless."""

    def _is_held(self) -> bool:
        return False


# -- the engine ----------------------------------------------------------------------------------


class WaitsForTheOrder(EngineWave):
    """Requests a start but does not start itself, and is the one that orders exclude."""

    asked = False

    def next_action(self, has_work: bool, load: RankState) -> Action:
        if self.phase is not Phase.PAUSED:
            self.asked = False
            return super().next_action(has_work, load)
        if has_work and not self.asked:
            self.asked = True
            self._report_start()
        return Park()


class IgnoresStaleRequests(EngineWave):
    """A paused rank is not started by a request stamped with an earlier wave."""

    fresh = False

    def request_received(self, wave: int) -> None:
        self.fresh |= wave >= self.wave
        super().request_received(wave)

    def _has_to_start(self, has_work: bool) -> bool:
        return super()._has_to_start(has_work and self.fresh)


class LeavesWakingToFrontEnds(EngineWave):
    """Starts with its request, but reports nothing: the front end's notice must wake the others."""

    def _report_start(self) -> None:
        pass


class StartsOnArrivalOnly(EngineWave):
    """Checks a request when it arrives, not the requests that it holds."""

    arrived = False

    def request_received(self, wave: int) -> None:
        self.arrived = self.phase is Phase.PAUSED
        super().request_received(wave)

    def _has_to_start(self, has_work: bool) -> bool:
        return super()._has_to_start(has_work and self.arrived)


class PausesAlone(EngineWave):
    """Pauses when it has no work itself."""

    def gathered(self, table: Sequence[Sequence[int]]) -> None:
        own = table[self._rank]
        super().gathered([own] * len(table) if self.phase is Phase.RUNNING else table)


class SkipsDummySteps(EngineWave):
    """Skips the steps for which it has no work."""

    def next_action(self, has_work: bool, load: RankState) -> Action:
        action = super().next_action(has_work, load)
        if self._loads is not None and not has_work:
            self.launched()
            self.landed()
            return super().next_action(has_work, load)
        return action


class GathersByOwnCount(EngineWave):
    """Counts the steps to the next gather from its own last work."""

    worked = 0

    def next_action(self, has_work: bool, load: RankState) -> Action:
        self.worked = self.worked + 1 if has_work else 0
        return super().next_action(has_work, load)

    def _gathers_now(self) -> bool:
        return super()._gathers_now() or (self.phase is Phase.RUNNING and self.worked == 0)


class ObeysBackwards(EngineWave):
    """Adopts whatever wave an order or a request names."""

    def _adopt(self, wave: int) -> None:
        self.wave = wave


class ObeysOldOrders(EngineWave):
    """Starts on orders of waves that are over."""

    def start_ordered(self, order: StartDpWave) -> None:
        wave = max(order.wave, self.wave)
        super().start_ordered(StartDpWave(wave, order.excluded_rank, order.hold_epoch))


class HoldsAlone(EngineWave):
    """Is held as soon as requested, without agreement of the others."""

    def pause_requested(self, epoch: int | None = None) -> None:
        super().pause_requested(epoch)
        if self.phase in (Phase.PAUSED, Phase.RUNNING) and is_hold(self.hold_epoch):
            self._stop(Verdict(Phase.HELD, self.wave, self.hold_epoch))


class RequestsEndHolds(EngineWave):
    """A request starts a held rank as if it were paused."""

    def _has_to_start(self, has_work: bool) -> bool:
        return super()._has_to_start(has_work) or (self.phase is Phase.HELD and has_work)


class OrdersEndHolds(EngineWave):
    """A late order starts a held rank as if it were paused."""

    def start_ordered(self, order: StartDpWave) -> None:
        is_new = order.wave >= self.wave
        super().start_ordered(order)
        if self.phase is Phase.HELD and is_new:
            self._start()


class ResumesAlone(EngineWave):
    """Resumes without reporting which operation that was."""

    def _report_start(self) -> None:
        told, self.hold_epoch = self.hold_epoch, 0
        super()._report_start()
        self.hold_epoch = told


class ResumesByItsOwnState(EngineWave):
    """Every resume begins with a gather, unless this rank happens to be stepping."""

    def resume_requested(self, epoch: int | None = None) -> None:
        if self.phase is Phase.PAUSED:
            self._start()
        elif self.phase is Phase.RUNNING:
            self._loads = None
            self._tag += 1
        super().resume_requested(epoch)


class StaysInALostGroup(EngineWave):
    """Retries the failed collective instead of waiting for another group."""

    def group_lost(self) -> None:
        self._loads = None
        self._in_flight = 0


class KeepsItsCount(EngineWave):
    """Continues the count of collectives of the previous group."""

    def regroup(self, topology: int, **changes: Any) -> None:
        tag, step = self._tag, self.step
        super().regroup(topology, **changes)
        self._tag, self.step = tag, step


class SkipsForming(EngineWave):
    """Continues in a new group without the gather that synchronizes the clocks."""

    def regroup(self, topology: int, **changes: Any) -> None:
        was_running = self.step > 0 or self._tag > 0
        super().regroup(topology, **changes)
        self.phase = Phase.RUNNING if was_running else Phase.PAUSED


class StartsWithoutAGroup(EngineWave):
    """Follows start orders while it is in no group, and considers the next one running."""

    def start_ordered(self, order: StartDpWave) -> None:
        self._ordered = self.phase is Phase.APART
        super().start_ordered(order)

    def regroup(self, topology: int, **changes: Any) -> None:
        super().regroup(topology, **changes)
        if vars(self).get("_ordered"):
            self.phase = Phase.RUNNING
            self._loads = ()


class PausesBeforeLanding(EngineWave):
    """Ends a wave as soon as the table allows it, regardless of steps in flight."""

    def gathered(self, table: Sequence[Sequence[int]]) -> None:
        in_flight, self._in_flight = self._in_flight, 0
        super().gathered(table)
        self._in_flight = in_flight


class EndsInOneGather(EngineWave):
    """Ends a wave when its own steps have landed, while others may still compute theirs."""

    def gathered(self, table: Sequence[Sequence[int]]) -> None:
        super().gathered(table)
        self._judged = judge([GatherRow.unpack(values) for values in table])

    def landed(self) -> None:
        super().landed()
        if self._must_land and not self._in_flight:
            self._must_land = False
            self._stop(self._judged)


class OverlapsOnRank0Only(EngineWave):
    """Waits for a step in flight before it gathers for the next one, unless it is rank 0."""

    def next_action(self, has_work: bool, load: RankState) -> Action:
        action = super().next_action(has_work, load)
        if isinstance(action, Gather) and self._in_flight and self._rank:
            return Land(drains=True)
        return action


class SettlesAlone(EngineWave):
    """Launches no further step if it has no work and one is in flight."""

    def gathered(self, table: Sequence[Sequence[int]]) -> None:
        own = table[self._rank]
        super().gathered([own] * len(table) if self._in_flight else table)


class KeepsItsSteps(EngineWave):
    """Waits in a new group for steps that were launched in the previous one."""

    def group_lost(self) -> None:
        in_flight = self._in_flight
        super().group_lost()
        self._in_flight = in_flight


# -- the verdicts --------------------------------------------------------------------------------

NOTICED = Setup(order_window=2)
REPEATED = Setup(duplicates=1)
ONE_REQUEST = Setup(notices=False)
THREE_ENGINES = Setup(engines=3, notices=False)
NO_NOTICES = Setup(requests=2, notices=False)
HELD_ONCE = Setup(calls=(Call("pause", 1, (1,)), RESUME), notices=False)
NOTICED_WHILE_HELD = Setup(
    calls=(Call("pause", 1, (0,)), Call("resume", 2, (0,))), coordinator=ForgetsHolds
)
RESUMED_AT_ONE = Setup(calls=(Call("pause", 1, (0,)), Call("resume", 2, (1,))), notices=False)
LONG_STEPS = Setup(steps=3, gather_interval=2, notices=False)
LATE_DRAIN = Setup(requests=2, drains_late=True, notices=False)
REPLACED = Setup(engine_restarts=1, notices=False)
OVERLAPPED = Setup(max_in_flight=2, steps=2, notices=False)
OVERLAPPED_REPLACED = replace(OVERLAPPED, engine_restarts=1)

HANG, LONER, STALE, RESTLESS = "no way to the end", "enters", "goes back", "waves for|left again"
EARLY, UNKNOWN = "ends with steps in flight", "has not launched"
"""Expected findings: a request that never ends, a rank alone in a collective, a wave that goes
back, unneeded waves, a wave that ends too early, and a step that was never launched."""

COORDINATORS = [
    (RunningByOrder, NOTICED, HANG),
    (OrderOnce, NO_NOTICES, HANG),
    (OneStarterIsEnough, THREE_ENGINES, HANG),
    (CompletesAnyWave, NO_NOTICES, HANG),
    (FollowsTheLastReport, NO_NOTICES, STALE),
    (WakesForOldNotices, REPEATED, RESTLESS),
]

ENGINES = [
    (WaitsForTheOrder, NO_NOTICES, HANG),
    (IgnoresStaleRequests, NO_NOTICES, HANG),
    (LeavesWakingToFrontEnds, NOTICED, HANG),
    (StartsOnArrivalOnly, LATE_DRAIN, HANG),
    (PausesAlone, NO_NOTICES, LONER),
    (SkipsDummySteps, NO_NOTICES, LONER),
    (GathersByOwnCount, LONG_STEPS, LONER),
    (ObeysBackwards, NO_NOTICES, STALE),
    (ObeysOldOrders, ONE_REQUEST, RESTLESS),
    (HoldsAlone, HELD_ONCE, LONER),
    (RequestsEndHolds, HELD_ONCE, LONER),
    (OrdersEndHolds, NOTICED_WHILE_HELD, LONER),
    (ResumesAlone, RESUMED_AT_ONE, HANG),
    (ResumesByItsOwnState, HELD_ONCE, LONER),
    (StaysInALostGroup, REPLACED, HANG),
    (KeepsItsCount, REPLACED, LONER),
    (SkipsForming, REPLACED, HANG),
    (StartsWithoutAGroup, REPLACED, LONER),
    (PausesBeforeLanding, OVERLAPPED, EARLY),
    (EndsInOneGather, OVERLAPPED, EARLY),
    (OverlapsOnRank0Only, OVERLAPPED, EARLY),
    (SettlesAlone, OVERLAPPED, LONER),
    (KeepsItsSteps, OVERLAPPED_REPLACED, UNKNOWN),
]

CONFIGURATIONS = {
    "repeated": REPEATED, "held once": HELD_ONCE, "noticed while held": NOTICED_WHILE_HELD,
    "resumed at one rank": RESUMED_AT_ONE, "late drain": LATE_DRAIN,
}  # fmt: skip
"""Setups in which mutants are detected and the suite explores nothing larger:
`tests.protocol.catalog` has the others, or the same with more requests, orders or notices."""


def named(value: object) -> str:
    """Return the name of a mutant for a test's id."""
    return value.__name__ if isinstance(value, type) else ""


pytestmark = pytest.mark.mutants


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_unmodified_protocol_passes_setups_of_mutants(name: str) -> None:
    result = explore(World(CONFIGURATIONS[name]))
    assert result.problem is None, result.problem


@pytest.mark.parametrize(("mutant", "setup", "what"), COORDINATORS, ids=named)
def test_broken_coordinator_is_detected(
    mutant: type[LockstepWave], setup: Setup, what: str
) -> None:
    problem = explore(World(replace(setup, coordinator=mutant))).problem
    assert problem is not None
    assert re.search(what, f"{problem.kind}: {problem.text}"), problem


@pytest.mark.parametrize(("mutant", "setup", "what"), ENGINES, ids=named)
def test_broken_engine_is_detected(mutant: type[EngineWave], setup: Setup, what: str) -> None:
    problem = explore(World(replace(setup, engine=mutant))).problem
    assert problem is not None
    assert re.search(what, f"{problem.kind}: {problem.text}"), problem
