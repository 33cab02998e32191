"""Pause, resume, sleep and wake_up of a group of two, in any order of delivery."""

from engine.core.engine_core import EngineCore
from engine.executor.simulated import SimulatedExecutor
from engine.lockstep.deferred_calls import DeferredCalls
from engine.lockstep.wave import EngineWave, Gather, Park, Phase
from engine.scheduler.admission import RankState
from engine.shared.config import CacheConfig, EngineConfig, ExecutorConfig
from engine.shared.messages import StartDpWave, StartWave, UtilityCall

IDLE = RankState(*[0] * len(RankState._fields))
CONFIG = EngineConfig(
    cache=CacheConfig(num_kv_blocks=8), executor=ExecutorConfig(executor="simulated")
)


class Rank:
    """One rank's core, wave and calls, without the loop around them."""

    def __init__(self, rank: int) -> None:
        executor = SimulatedExecutor(CONFIG, vocab_size=100, timing="virtual")
        self.wave = EngineWave(rank=rank, incarnation=rank + 10)
        self.core = EngineCore(CONFIG, executor, rank=rank, incarnation=rank + 10, clock=self.wave)
        self.core.front_end_joined(0, 1)
        self.calls = DeferredCalls(self.core, self.wave)
        self.has_work = False

    def ask(self, name: str) -> None:
        assert self.calls.take(UtilityCall(1, 0, name))

    def answers(self) -> list[str | None]:
        step = self.core.answers()
        return [] if step is None else [result.error for _, result in step.utility_results]

    def order(self) -> StartDpWave:
        """The coordinator's reaction to this rank's start report."""
        self.wave.next_action(self.has_work, IDLE)
        (start,) = [each for each in self.wave.take_reports() if isinstance(each, StartWave)]
        return StartDpWave(start.wave, start.rank, start.hold_epoch, start.topology)


def gather(*ranks: Rank) -> None:
    rows = []
    for rank in ranks:
        action = rank.wave.next_action(rank.has_work, IDLE)
        assert isinstance(action, Gather), action
        rows.append(action.row.pack())
    for rank in ranks:
        rank.wave.gathered(rows)
        rank.calls.gathered()


def held(call: str) -> tuple[Rank, Rank]:
    """Two ranks whose group is held because both received `call`."""
    ranks = Rank(0), Rank(1)
    gather(*ranks)
    for rank in ranks:
        rank.ask(call)
    gather(*ranks)
    for rank in ranks:
        assert isinstance(rank.wave.next_action(False, IDLE), Park)
        assert rank.calls.settle()
        assert rank.answers() == [None]
        assert rank.core.halting.is_paused
        rank.wave.take_reports()
    return ranks


def test_rank_that_learns_of_resume_before_its_call_answers_the_call() -> None:
    for has_work in (True, False):
        first, second = held("pause")
        first.has_work = has_work
        first.ask("resume")
        assert first.calls.settle()
        assert first.answers() == [None]
        second.wave.start_ordered(first.order())
        second.ask("resume")
        gather(first, second)
        assert second.answers() == [None]
        assert first.wave.phase is second.wave.phase
        assert not first.core.halting.is_paused
        assert not second.core.halting.is_paused


def test_call_after_end_of_hold_is_answered_immediately() -> None:
    first, second = held("pause")
    first.ask("resume")
    assert first.calls.settle()
    second.wave.start_ordered(first.order())
    gather(first, second)
    assert first.wave.phase is Phase.PAUSED
    assert not second.core.halting.is_paused
    second.ask("resume")
    assert second.answers() == [None]


def test_ranks_of_a_group_without_work_wake_up_together() -> None:
    first, second = held("sleep")
    assert first.core.halting.is_sleeping
    assert second.core.halting.is_sleeping
    first.ask("wake_up")
    assert first.calls.settle()
    second.wave.start_ordered(first.order())
    gather(first, second)
    assert not first.core.halting.is_sleeping
    assert not second.core.halting.is_sleeping
    second.ask("wake_up")
    assert second.answers() == [None]


def test_pause_requested_before_resume_arrives_holds_group_again() -> None:
    first, second = held("pause")
    first.ask("resume")
    assert first.calls.settle()
    assert first.answers() == [None]
    second.ask("pause")
    second.wave.start_ordered(first.order())
    gather(first, second)
    assert not first.core.halting.is_paused
    assert not second.core.halting.is_paused
    assert second.answers() == []

    second.wave.take_reports()
    first.wave.start_ordered(second.order())
    gather(first, second)
    for rank in (first, second):
        assert isinstance(rank.wave.next_action(False, IDLE), Park)
        assert rank.calls.settle()
        assert rank.core.halting.is_paused
    assert second.answers() == [None]
