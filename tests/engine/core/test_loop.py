"""The loop of an engine outside a lockstep group, one iteration at a time."""

from queue import SimpleQueue

import pytest

from engine.core.engine_core import EngineCore
from engine.core.events import (
    Drain,
    FrontEndJoined,
    FrontEndLeft,
    InboxItem,
    Rejoined,
    Stop,
    Welcomed,
)
from engine.core.front_ends import CoreStep
from engine.core.loop import (
    ANNOUNCEMENT_SECONDS,
    IDLE_STATS_DELAY,
    IDLE_STATS_INTERVAL,
    EngineLoop,
)
from engine.core.shutdown import DRAINING_WAIT, LATE_SENDS_SECONDS
from engine.core.watchdog import StepWatch
from engine.executor.simulated import SimulatedExecutor
from engine.shared.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.shared.messages import (
    AddRequest,
    EngineReport,
    FormGroup,
    SamplingParams,
    StartDpWave,
)

CONFIG = EngineConfig(
    cache=CacheConfig(num_kv_blocks=8), scheduler=SchedulerConfig(async_scheduling=False)
)
DRAIN_TIMEOUT = 30.0


class Loop(EngineLoop):
    """Runs steps when the test allows it."""

    computing: int | None = None
    """Tokens of the next step."""
    settled = 0.0

    def compute(self, tokens: int) -> None:
        self.computing = tokens

    def settle(self, seconds: float) -> None:
        self.settled = seconds


class Engine:
    """A core with one front end, its loop, and their messages."""

    def __init__(self) -> None:
        executor = SimulatedExecutor(CONFIG, vocab_size=100, timing="virtual")
        self.core = EngineCore(CONFIG, executor, rank=1, incarnation=5)
        self.now = 0.0
        self.said: list[tuple[int, int]] = []
        """Waiting and running sequences in each stats message since the last iteration."""
        self.refused = 0
        self.loop = Loop(
            self.core,
            SimpleQueue(),
            self,
            StepWatch(60.0),
            drain_timeout=DRAIN_TIMEOUT,
            on_iteration=lambda: None,
            on_drain=self._refuse,
            clock=lambda: self.now,
        )
        self.turn(0.0, FrontEndJoined(0, 9))

    def send_step(self, step: CoreStep) -> None:
        self.said.append((step.stats.waiting, step.stats.running))

    def report(self, report: EngineReport) -> None:
        raise AssertionError(report)

    def _refuse(self) -> None:
        self.refused += 1

    def turn(self, now: float, *items: InboxItem) -> int | None:
        """Run one iteration; return the tokens of the requested step, if any."""
        self.now, self.said, self.loop.computing = now, [], None
        self.loop.run_once(items)
        return self.loop.computing

    def compute(self, now: float) -> None:
        self.now, self.said = now, []
        self.loop.computed(self.core.step())


@pytest.fixture
def engine() -> Engine:
    return Engine()


def request(id: int, *, max_tokens: int = 1, alone: int = 0) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return AddRequest(id, str(id), 0, 0, [1, 2, 3], sampling, exclusive_steps=alone)


def test_an_idle_engine_sends_its_stats_periodically(engine: Engine) -> None:
    assert engine.turn(0.5) is None
    assert (engine.said, engine.loop.wait) == ([], IDLE_STATS_INTERVAL - 0.5)
    assert engine.turn(IDLE_STATS_INTERVAL) is None
    assert (engine.said, engine.loop.wait) == ([(0, 0)], IDLE_STATS_INTERVAL)


def test_start_of_work_is_reported_before_first_step(engine: Engine) -> None:
    assert engine.turn(0.1, request(1, max_tokens=2)) == 3
    assert engine.said == [(1, 0)]
    engine.compute(0.2)
    assert engine.said == [(0, 1)]
    assert engine.turn(0.2) == 1
    assert engine.said == [], "it is known already"
    engine.compute(0.5)
    assert engine.said == [(0, 0)]


def test_the_end_of_work_is_reported_again_if_nothing_follows(engine: Engine) -> None:
    engine.turn(0.1, request(1))
    engine.compute(0.5)
    assert engine.turn(0.5) is None
    assert engine.said == []
    assert engine.loop.wait == pytest.approx(IDLE_STATS_DELAY)
    engine.turn(0.5 + IDLE_STATS_DELAY)
    assert (engine.said, engine.loop.wait) == ([(0, 0)], IDLE_STATS_INTERVAL)


def test_all_front_ends_are_notified_before_suspect_runs(engine: Engine) -> None:
    engine.turn(0.1, request(1, alone=1))
    assert not engine.loop.settled
    engine.compute(0.2)
    assert engine.said
    assert engine.loop.settled == ANNOUNCEMENT_SECONDS


def test_engine_stops_immediately_on_request(engine: Engine) -> None:
    stop = Stop("a worker died")
    assert engine.turn(0.1, request(1), stop) is None
    assert engine.loop.stopped == stop


def test_draining_engine_finishes_requests_in_transit(engine: Engine) -> None:
    assert engine.turn(1.0, Drain()) is None
    assert (engine.refused, engine.loop.wait) == (1, DRAINING_WAIT)
    late = 1.0 + LATE_SENDS_SECONDS / 2
    assert engine.turn(late, request(1)) == 3
    assert engine.turn(2.0) == 3, "it has a request"
    engine.compute(2.1)
    assert engine.loop.stopped is None
    assert engine.turn(2.1) is None
    assert engine.loop.stopped == Stop()


def test_draining_engine_exits_immediately_without_front_ends(engine: Engine) -> None:
    engine.turn(1.0, Drain(), FrontEndLeft(0))
    assert (engine.refused, engine.loop.stopped) == (1, Stop())


def test_draining_engine_exits_after_timeout(engine: Engine) -> None:
    engine.turn(1.0, Drain(), request(1))
    assert engine.turn(1.0 + DRAIN_TIMEOUT) == 3
    assert engine.turn(1.1 + DRAIN_TIMEOUT) is None
    assert engine.loop.stopped == Stop()


def test_wave_of_independent_engine_follows_coordinator(
    engine: Engine,
) -> None:
    engine.turn(0.1, StartDpWave(4, -1), StartDpWave(2, -1), Rejoined(3))
    assert engine.core.stats().wave == 4


def test_loop_ignores_group_and_welcome_events(engine: Engine) -> None:
    assert engine.turn(0.1, FormGroup(1, []), Welcomed(1, 0)) is None
    assert (engine.said, engine.loop.wait) == ([], IDLE_STATS_INTERVAL - 0.1)
