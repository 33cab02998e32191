"""What the loop of an engine that steps alone does, turn by turn."""

from collections.abc import Sequence

import pytest

from engine.core.ending import DRAINING_WAIT, LATE_SENDS_SECONDS
from engine.core.engine_core import EngineCore
from engine.core.events import FrontEndJoined, FrontEndLeft, Rejoined
from engine.core.inbox import Drain, InboxItem, Stop, Welcomed
from engine.core.turns import (
    ANNOUNCEMENT_SECONDS,
    END_SECONDS,
    IDLE_STATS_INTERVAL,
    Action,
    Compute,
    End,
    RefuseNew,
    Rest,
    Say,
    Settle,
    Turns,
)
from engine.executor.simulated import SimulatedExecutor
from engine.shared.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.shared.messages import AddRequest, FormGroup, SamplingParams, StartDpWave

CONFIG = EngineConfig(
    cache=CacheConfig(num_kv_blocks=8), scheduler=SchedulerConfig(async_scheduling=False)
)
DRAIN_TIMEOUT = 30.0


class Engine:
    """A core with one front end, and its turns."""

    def __init__(self) -> None:
        executor = SimulatedExecutor(CONFIG, vocab_size=100, timing="virtual")
        self.core = EngineCore(CONFIG, executor, rank=1, incarnation=5)
        self.turns = Turns(self.core, DRAIN_TIMEOUT)
        self.turn(0.0, FrontEndJoined(0, 9))

    def turn(self, now: float, *items: InboxItem) -> list[Action]:
        return self.turns.turn(items, now)

    def compute(self, now: float) -> Sequence[Action]:
        return self.turns.computed(self.core.step(), now)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def request(id: int, *, max_tokens: int = 1, alone: int = 0) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return AddRequest(id, str(id), 0, 0, [1, 2, 3], sampling, alone=alone)


def said(actions: Sequence[Action]) -> list[tuple[int, int]]:
    """Waiting and running sequences of each stats that is told."""
    return [
        (action.step.stats.waiting, action.step.stats.running)
        for action in actions
        if isinstance(action, Say)
    ]


def test_an_engine_without_work_tells_its_stats_now_and_then(engine: Engine) -> None:
    assert engine.turn(0.5) == [Rest(IDLE_STATS_INTERVAL - 0.5)]
    stats, rest = engine.turn(IDLE_STATS_INTERVAL)
    assert said([stats]) == [(0, 0)]
    assert rest == Rest(IDLE_STATS_INTERVAL)


def test_work_is_seen_to_have_begun_before_its_first_step(engine: Engine) -> None:
    stats, compute = engine.turn(0.1, request(1, max_tokens=2))
    assert said([stats]) == [(1, 0)]
    assert compute == Compute(3)
    assert said(engine.compute(0.2)) == [(0, 1)]
    assert engine.turn(0.2) == [Compute(1)], "it is known already"
    assert said(engine.compute(0.5)) == [(0, 0)]


def test_the_end_of_work_is_told_again_if_nothing_follows(engine: Engine) -> None:
    engine.turn(0.1, request(1))
    engine.compute(0.5)
    (rest,) = engine.turn(0.5)
    assert isinstance(rest, Rest)
    assert rest.seconds == pytest.approx(END_SECONDS)
    stats, rest = engine.turn(0.5 + END_SECONDS)
    assert said([stats]) == [(0, 0)]
    assert rest == Rest(IDLE_STATS_INTERVAL)


def test_everybody_hears_of_a_suspect_before_it_runs(engine: Engine) -> None:
    engine.turn(0.1, request(1, alone=1))
    _, settle = engine.compute(0.2)
    assert settle == Settle(ANNOUNCEMENT_SECONDS)


def test_an_engine_that_has_to_stop_does_so_at_once(engine: Engine) -> None:
    stop = Stop("a worker died")
    assert engine.turn(0.1, request(1), stop)[-1] == End(stop)


def test_a_draining_engine_waits_for_what_is_on_its_way_and_finishes_it(engine: Engine) -> None:
    refuse, rest = engine.turn(1.0, Drain())
    assert refuse == RefuseNew()
    assert rest == Rest(DRAINING_WAIT)
    late = 1.0 + LATE_SENDS_SECONDS / 2
    assert engine.turn(late, request(1))[-1] == Compute(3)
    assert engine.turn(2.0) == [Compute(3)], "it has a request"
    engine.compute(2.1)
    assert engine.turn(2.1) == [End(Stop())]


def test_a_draining_engine_ends_at_once_where_nobody_could_send_anything(engine: Engine) -> None:
    assert engine.turn(1.0, Drain(), FrontEndLeft(0)) == [RefuseNew(), End(Stop())]


def test_a_draining_engine_does_not_wait_for_ever(engine: Engine) -> None:
    engine.turn(1.0, Drain(), request(1))
    assert engine.turn(1.0 + DRAIN_TIMEOUT) == [Compute(3)]
    assert engine.turn(1.1 + DRAIN_TIMEOUT) == [End(Stop())]


def test_the_wave_of_an_engine_that_steps_alone_is_what_the_coordinator_says(
    engine: Engine,
) -> None:
    engine.turn(0.1, StartDpWave(4, -1), StartDpWave(2, -1), Rejoined(3))
    assert engine.core.stats().wave == 4


def test_what_concerns_groups_or_joining_means_nothing_to_it(engine: Engine) -> None:
    assert engine.turn(0.1, FormGroup(1, []), Welcomed(1, 0)) == [Rest(IDLE_STATS_INTERVAL - 0.1)]
