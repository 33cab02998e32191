"""The loops of a group's engines, in threads of one process: steps, holds and lost groups."""

import random
import threading
from functools import partial
from queue import SimpleQueue
from typing import cast

import pytest
import torch

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import PendingResult
from engine.core.engine_core import EngineCore
from engine.core.events import InboxItem, Stop
from engine.core.front_ends import CoreStep
from engine.core.shutdown import Shutdown
from engine.core.watchdog import StepWatch
from engine.distributed.engines import EngineGroup
from engine.distributed.group import PendingRows
from engine.distributed.spec import GroupBroken
from engine.executor.step_thread import StepThread
from engine.lockstep.grouping import Grouping
from engine.lockstep.loop import LockstepLoop
from engine.lockstep.wave import EngineWave, Phase, WaveReport
from engine.shared.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    EngineDead,
    EngineStats,
    FormGroup,
    GroupMember,
    SamplingParams,
    StartDpWave,
    StartWave,
    UtilityCall,
)
from tests.support.checked_executor import CheckedExecutor
from tests.support.waiting import until

SIZE = 2
MEMBERS = [GroupMember(rank, rank + 1) for rank in range(SIZE)]


def config(*, overlap: bool, policy: str, whole: bool = False) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=128),
        cache=CacheConfig(block_size=4, num_kv_blocks=40),
        scheduler=SchedulerConfig(
            max_num_seqs=3,
            max_num_batched_tokens=128 if whole else 16,
            enable_chunked_prefill=not whole,
            async_scheduling=overlap,
            admission_policy=policy,
        ),
    )


class Meeting:
    """A collective in which all ranks exchange values; completes for all at once."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(SIZE)
        self._brought: list[list[int]] = [[]] * SIZE
        self._shown: list[list[int]] = []

    def come(self, rank: int, what: list[int]) -> list[list[int]]:
        try:
            self._brought[rank] = what
            self._barrier.wait()
            shown = list(self._brought)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise GroupBroken("somebody left") from None
        return shown

    def end(self) -> None:
        self._barrier.abort()


class Formation:
    """One formation of the group: the state shared by its members."""

    def __init__(self) -> None:
        self.rows, self.steps = Meeting(), Meeting()

    def end(self) -> None:
        self.rows.end()
        self.steps.end()


class Rows:
    """A gather that completes when it is awaited."""

    def __init__(self, formation: Formation, rank: int, row: list[int]) -> None:
        self._formation, self._rank, self._row = formation, rank, row

    def wait_for(self, seconds: float) -> bool:
        return True

    def wait(self) -> list[list[int]]:
        return self._formation.rows.come(self._rank, self._row)


class Group:
    """One member's end of a formation."""

    size = SIZE

    def __init__(self, formation: Formation, rank: int, topology: int) -> None:
        self.formation, self.rank, self.topology = formation, rank, topology

    def all_gather_rows(self, row: list[int]) -> PendingRows:
        return cast("PendingRows", Rows(self.formation, self.rank, row))

    def abort(self) -> None:
        self.formation.end()


class JoinedExecutor(CheckedExecutor):
    """Synchronizes with the others in each step, in a separate thread if steps overlap."""

    def __init__(self, settings: EngineConfig, rank: int) -> None:
        super().__init__(settings)
        self.thread = StepThread(torch.device("cpu"), own_thread=settings.scheduler.steps_overlap)
        self._rank = rank
        self._formation = Formation()
        self._number = 0

    def join(self, formation: Formation) -> None:
        self.thread.regroup()
        self._formation = formation
        self._number = 0

    def submit(self, plan: BatchPlan) -> PendingResult:
        return self.thread.submit(self._step, plan)

    def _step(self, plan: BatchPlan) -> BatchResult:
        numbers = self._formation.steps.come(self._rank, [self._number])
        assert numbers == [[self._number]] * SIZE
        self._number += 1
        return super().submit(plan).result()


class Assignments:
    """Joins every ordered formation; replaces `Grouping`."""

    def __init__(self, rank: int, executor: JoinedExecutor, formations: list[Formation]) -> None:
        self._rank, self._executor, self._formations = rank, executor, formations
        self._topology = 0

    def announce(self) -> None:
        pass

    def ordered(self, order: FormGroup) -> EngineGroup | None:
        if order.topology <= self._topology:
            return None
        self._topology = order.topology
        formation = self._formations[order.topology]
        self._executor.join(formation)
        return cast("EngineGroup", Group(formation, self._rank, order.topology))

    def leave_broken(self, error: GroupBroken) -> None:
        pass


class Engine:
    """A member: its loop in a thread, its inbox and its outputs."""

    def __init__(self, cluster: "Cluster", rank: int, settings: EngineConfig) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.granted: list[int] = []
        self.failure: Exception | None = None
        self.inbox: SimpleQueue[InboxItem] = SimpleQueue()
        self.executor = JoinedExecutor(settings, rank)
        self.wave = EngineWave(
            rank=rank,
            incarnation=rank + 1,
            max_in_flight=1 + settings.scheduler.steps_overlap,
            phase=Phase.APART,
        )
        self.core = EngineCore(
            settings, self.executor, rank=rank, incarnation=rank + 1, clock=self.wave
        )
        self.core.front_end_joined(0, 1)
        self._cluster = cluster
        assignments = Assignments(rank, self.executor, cluster.formations)
        self.loop = LockstepLoop(
            self.core,
            self.wave,
            cast("Grouping", assignments),
            Shutdown(self.core, 1.0),
            self.inbox,
            self,
            StepWatch(60.0),
            on_iteration=lambda: None,
            on_drain=lambda: None,
            on_wave=lambda wave: None,
            on_joined=lambda: None,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def computes(self) -> bool:
        """Whether a step is in flight; abandoned steps do not count."""
        return any(each.pending is not None for each in self.core.steps.in_flight)

    @property
    def rests(self) -> bool:
        """Whether it is paused with nothing left to compute or send."""
        core = self.core
        is_paused = self.wave.phase is Phase.PAUSED
        return is_paused and not (core.steps.in_flight or core.has_requests)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.failure = error
        self.loop.end()

    def send_step(self, step: CoreStep) -> None:
        for output in step.outputs.get(0, []):
            self.tokens.setdefault(output.id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ended.add(output.id)
        for _, result in step.utility_results:
            assert result.error is None, result.error
            self.granted.append(result.call_id)

    def report(self, report: EngineStats | WaveReport) -> None:
        """Simulate a coordinator that wakes all others at once."""
        if isinstance(report, StartWave):
            order = StartDpWave(report.wave, report.rank, report.hold_epoch, report.topology)
            for engine in self._cluster.engines:
                engine.inbox.put(order)

    def send_failure(self, words: EngineDead) -> None:
        raise AssertionError(words)


class Cluster:
    """All engines of a group, in its first formation."""

    def __init__(self, settings: EngineConfig) -> None:
        self.formations = [Formation(), Formation()]
        self.engines: list[Engine] = []
        self.engines += [Engine(self, rank, settings) for rank in range(SIZE)]
        self.form()

    def form(self) -> None:
        topology = len(self.formations) - 1
        for engine in self.engines:
            engine.inbox.put(FormGroup(topology, MEMBERS, "somewhere"))

    def regroup(self) -> None:
        """Break the current group and form a new one."""
        self.formations.append(Formation())
        self.formations[-2].end()
        self.form()

    def hold(self, call: int, first: Engine, second: Engine) -> None:
        """Let one engine hold the group and another release it; wait for both."""
        first.inbox.put(UtilityCall(call - 1, 0, "pause"))
        until(lambda: call - 1 in first.granted, "the group is held")
        assert not any(engine.computes for engine in self.engines)
        second.inbox.put(UtilityCall(call, 0, "resume"))
        until(
            lambda: call in second.granted and not any(each.wave.held for each in self.engines),
            "the hold is over",
        )

    def check(self) -> None:
        for engine in self.engines:
            if engine.failure is not None:
                raise engine.failure

    def wait_for(self, ids: set[int]) -> dict[int, list[int]]:
        """Wait until these requests have finished; return their tokens."""

        def are_over() -> bool:
            self.check()
            return ids <= set().union(*(engine.ended for engine in self.engines))

        until(are_over, "all requests end")
        return {id: tokens for engine in self.engines for id, tokens in engine.tokens.items()}

    def end(self) -> None:
        for engine in self.engines:
            engine.inbox.put(Stop())
        for engine in self.engines:
            engine.thread.join(60)
            assert not engine.thread.is_alive()
            engine.executor.thread.shutdown()
        self.check()


def request(id: int) -> AddRequest:
    rng = random.Random(id)
    prompt = [rng.randrange(100) for _ in range(rng.randint(1, 40))]
    sampling = SamplingParams(max_tokens=rng.randint(1, 30), seed=id)
    return AddRequest(id, f"request-{id}", 0, 0, prompt, sampling)


def served(
    seed: int, *, overlap: bool, policy: str, disturbed: bool, whole: bool = False
) -> dict[int, list[int]]:
    """Serve ten requests on two engines while the group breaks and is held; return the tokens."""
    rng = random.Random(seed)
    cluster = Cluster(config(overlap=overlap, policy=policy, whole=whole))
    calls = 0
    try:
        for id in range(1, 11):
            engine = cluster.engines[rng.randrange(SIZE)]
            engine.inbox.put(request(id))
            if disturbed and rng.random() < 0.4:
                cluster.wait_for(set(range(1, rng.randint(1, id) + 1)))
            if disturbed and rng.random() < 0.4:
                cluster.regroup()
            if disturbed and rng.random() < 0.3:
                calls += 2
                cluster.hold(calls, engine, cluster.engines[rng.randrange(SIZE)])
            if disturbed and rng.random() < 0.2:
                engine.inbox.put(AbortRequests([100 + id]))
        tokens = cluster.wait_for(set(range(1, 11)))
        until(lambda: all(engine.rests for engine in cluster.engines), "all pause")
    finally:
        cluster.end()
    return tokens


def test_a_dummy_batch_is_a_step_of_all_engines() -> None:
    cluster = Cluster(config(overlap=False, policy="level"))

    def steps() -> int:
        return min(each.core.steps.count for each in cluster.engines)

    try:
        for number, engine in enumerate(cluster.engines):
            until(lambda: all(each.rests for each in cluster.engines), "all pause")
            before = steps()
            engine.inbox.put(UtilityCall(number, 0, "execute_dummy_batch"))
            until(partial(lambda before: steps() > before, before), "all step")
    finally:
        cluster.end()


@pytest.mark.parametrize(
    ("policy", "whole"),
    [("level", False), ("level", True), ("none", False), ("balance", False), ("cadence", False)],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_group_changes_do_not_change_tokens(overlap: bool, policy: str, whole: bool) -> None:
    expected = served(0, overlap=False, policy=policy, disturbed=False)
    assert sum(map(len, expected.values())) == sum(
        request(id).sampling.max_tokens for id in expected
    )
    for seed in range(6):
        assert served(seed, overlap=overlap, policy=policy, disturbed=True, whole=whole) == expected
