import itertools
from collections.abc import Sequence

import msgspec
import pytest

from engine.batch.batch import BatchPlan
from engine.batch.executor import PendingResult
from engine.core.engine_core import EngineCore
from engine.core.front_ends import CoreStep
from engine.distributed.spec import GroupBroken
from engine.executor.simulated import SimulatedExecutor, simulated_token
from engine.scheduler.admission import NO_LOAD, Grant, RankState
from engine.shared.messages import (
    AbortRequests,
    Received,
    UtilityCall,
    UtilityResult,
)
from tests.engine.core.conftest import CONFIG, request, run
from tests.support.checked_executor import CheckedExecutor


def test_tokens_of_request_are_returned_to_its_front_end(core: EngineCore) -> None:
    assert not core.has_work
    core.handle(request(1, front_end=1))
    steps = run(core)
    assert [list(step.outputs) for step in steps] == [[1]] * 3
    outputs = [output for step in steps for output in step.outputs[1]]
    tokens = list(range(5))
    for _ in range(3):
        tokens.append(simulated_token(1, len(tokens), tokens[-1], 32_000))
    assert [output.token_ids for output in outputs] == [[token] for token in tokens[5:]]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]


def test_setup_reports_executor_info(core: EngineCore) -> None:
    setup = core.setup
    assert (setup.num_kv_blocks, setup.block_size, setup.max_model_len) == (32, 4, 64)
    assert setup.model_fingerprint == "simulated-32000"
    assert (setup.enable_prefix_caching, setup.gpu_memory_utilization) == (True, 0.9)
    assert (setup.num_kv_blocks_set, setup.kv_cache_memory_bytes) == (32, None)


@pytest.mark.parametrize("overlap", [False, True])
def test_engine_reports_queue_time_of_requests(overlap: bool) -> None:
    scheduling = msgspec.structs.replace(CONFIG.scheduler, max_num_seqs=1, async_scheduling=overlap)
    config = msgspec.structs.replace(CONFIG, scheduler=scheduling)
    clock = itertools.count()  # advances by a second per call
    executor = CheckedExecutor(config)
    core = EngineCore(config, executor, rank=0, incarnation=1, now=lambda: float(next(clock)))
    core.front_end_joined(0, 100)
    for id_ in (1, 2):
        core.handle(request(id_, max_tokens=8))
    last = {
        output.id: output.timing
        for step in run(core)
        for output in step.outputs.get(0, [])
        if output.finish_reason is not None
    }
    first, second = last[1], last[2]
    assert first is not None
    assert second is not None
    assert first.decode >= 7
    assert second.queue >= first.queue + first.prefill + first.decode
    assert second.prefill <= 3


def test_stats_contain_load_and_counts(core: EngineCore) -> None:
    for id in range(6):
        core.handle(request(id, id % 2))
    before = core.stats()
    assert (before.waiting, before.running, before.queued_prefill_tokens) == (6, 0, 30)
    stats = core.step().stats
    assert (stats.rank, stats.incarnation, stats.wave, stats.step) == (2, 77, 0, 1)
    assert (stats.waiting, stats.running) == (2, 4)
    assert stats.queued_prefill_tokens == 30 - 16
    assert stats.kv_usage == 8 / 32
    stats = run(core)[-1].stats
    assert (stats.waiting, stats.running, stats.kv_usage) == (0, 0, 0)
    assert stats.queued_prefill_tokens == 0
    assert (stats.counters.prompt_tokens, stats.counters.generation_tokens) == (30, 18)
    assert stats.counters.prefix_cache_queries == 30
    assert stats.counters.prefix_cache_hits == 8  # the two that started later


def test_stats_versions_increase(core: EngineCore) -> None:
    core.handle(request(1))
    versions = [core.stats().version, core.step().stats.version, core.stats().version]
    assert versions == sorted(set(versions))


# -- front ends -----------------------------------------------------------------------------------


def test_received_counts_are_kept_per_front_end_process(core: EngineCore) -> None:
    core.handle(request(1, 0, length=5))
    core.handle(request(2, 0, length=7))
    core.handle(request(3, 1, length=1000))  # refused, and received all the same
    assert core.stats().received == [Received(0, 100, 2, 12), Received(1, 101, 1, 1000)]
    core.front_end_joined(0, 100)
    assert core.stats().received[0] == Received(0, 100, 2, 12)
    core.front_end_joined(0, 555)
    core.handle(request(4, 0, length=3))
    assert Received(0, 555, 1, 3) in core.stats().received


def test_tokens_sampled_by_other_engine_count_as_received(core: EngineCore) -> None:
    begun = msgspec.structs.replace(request(1, 0, length=5), output_token_ids=[7, 8])
    core.handle(begun)
    assert core.stats().received[0] == Received(0, 100, 1, begun.num_tokens)
    assert begun.num_tokens == 7


def test_returning_front_end_keeps_its_counts(core: EngineCore) -> None:
    core.handle(request(1, 0))
    core.front_end_left(0)
    assert [entry.front_end for entry in core.stats().received] == [1]
    core.front_end_joined(0, 100)
    core.handle(request(2, 0))
    assert core.stats().received[0] == Received(0, 100, 2, 10)


@pytest.mark.parametrize("replaced", [False, True])
def test_requests_of_departed_front_end_are_dropped(core: EngineCore, replaced: bool) -> None:
    core.handle(request(1, 0, max_tokens=50))
    core.handle(request(2, 1))
    core.handle(request(3, 0, length=1000))  # its answer waits for the next step
    core.step()
    core.handle(UtilityCall(1, 0, "info"))
    if replaced:
        core.front_end_joined(0, 999)
    else:
        core.front_end_left(0)
    steps = run(core)
    assert len(steps) == 2
    assert all(list(step.outputs) == [1] for step in steps)
    assert all(step.utility_results == [] for step in steps)


def test_requests_of_absent_front_end_are_dropped(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    core.front_end_left(1)
    core.front_end_left(8)
    core.handle(request(1, 1))
    core.handle(request(2, 8))
    core.handle(UtilityCall(1, 8, "info"))
    assert not core.has_work
    assert "front end 1 is not connected" in caplog.text


# -- errors of requests and aborts ----------------------------------------------------------------


def test_a_request_that_cannot_run_is_answered_in_the_next_step(core: EngineCore) -> None:
    core.handle(request(1, length=64))
    core.handle(request(2))
    answers = core.step().outputs[0]
    assert [(answer.id, answer.finish_reason) for answer in answers] == [(1, "error"), (2, None)]
    assert answers[0].error is not None
    assert "64 tokens" in answers[0].error


def test_malformed_request_fails_without_affecting_others(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    core.handle(request(1))
    broken = msgspec.structs.replace(request(2), prompt_token_ids=[1, None])
    core.handle(broken)
    answers = core.step().outputs[0]
    assert [(answer.id, answer.finish_reason) for answer in answers] == [(2, "error"), (1, None)]
    assert "request-2 could not be queued" in caplog.text
    assert run(core)[-1].stats.counters.generation_tokens == 3


def test_pending_answer_counts_as_work(core: EngineCore) -> None:
    core.handle(request(1, length=64))
    assert core.has_work
    step = core.step()
    assert [output.id for output in step.outputs[0]] == [1]
    assert step.stats.step == 0
    assert not core.has_work


def test_aborted_requests_send_no_more_outputs(core: EngineCore) -> None:
    core.handle(request(1, max_tokens=50))
    core.handle(request(2))
    core.step()
    core.handle(AbortRequests([1, 12345]))
    assert {output.id for step in run(core) for output in step.outputs[0]} == {2}


# -- utilities ------------------------------------------------------------------------------------


def call(
    core: EngineCore, name: str, arguments: dict[str, str | int] | None = None
) -> UtilityResult:
    core.handle(UtilityCall(5, 1, name, {**(arguments or {})}))
    assert core.has_work
    [(front_end, result)] = core.step().utility_results
    assert (front_end, result.call_id, result.rank) == (1, 5, 2)
    return result


def test_info_describes_the_engine(core: EngineCore) -> None:
    result = call(core, "info").result
    assert isinstance(result, dict)
    assert result["num_kv_blocks"] == 32
    assert result["vocab_size"] == 32_000


# -- what the shell around the core relies on -----------------------------------------------------


class HoldUntil:
    """An admission policy that holds prefills before a given number of its steps."""

    exchanges = False

    def __init__(self, calls: int) -> None:
        self.tables: list[RankState] = []
        self._calls = calls

    def decide(self, step: int, table: Sequence[RankState]) -> Grant:
        self.tables += table
        return Grant(token_cap=-1 if len(self.tables) > self._calls else 0)


def test_the_admission_policy_sees_this_rank_and_decides() -> None:
    executor = CheckedExecutor(CONFIG)
    policy = HoldUntil(2)
    core = EngineCore(CONFIG, executor, rank=0, incarnation=1, admission=policy)
    core.front_end_joined(0, 1)
    core.handle(request(1, max_tokens=1))
    steps = run(core)
    assert [len(step.outputs) for step in steps] == [0, 0, 1]
    assert [step.stats.step for step in steps] == [0, 0, 1]
    assert policy.tables[0] == RankState(0, 1, 5, 32, ready_prefill_tokens=5, ready_prefills=1)


# -- in a lockstep group ---------------------------------------------------------------------------


class BreakingExecutor(CheckedExecutor):
    """Loses its group in some steps, before anything is computed."""

    def __init__(self, breaks_at: set[int]) -> None:
        super().__init__(CONFIG)
        self.plans: list[BatchPlan] = []
        self._breaks_at = breaks_at

    def submit(self, plan: BatchPlan) -> PendingResult:
        self.plans.append(plan)
        if len(self.plans) in self._breaks_at:
            raise GroupBroken("a member died")
        return super().submit(plan)


def member(executor: SimulatedExecutor, admission: HoldUntil | None = None) -> EngineCore:
    core = EngineCore(CONFIG, executor, rank=0, incarnation=1, admission=admission)
    core.front_end_joined(0, 1)
    return core


def step_together(core: EngineCore, number: int, loads: Sequence[RankState] = ()) -> CoreStep:
    """Complete a group step; abandon it if the group is lost."""
    try:
        core.steps.launch_together(number, loads)
        return core.land_together()
    except GroupBroken:
        core.steps.abandon_pending()
        raise


def test_a_step_without_work_is_an_empty_batch_and_counts_as_a_dummy() -> None:
    executor = BreakingExecutor(set())
    core = member(executor)
    assert not core.needs_steps
    step = step_together(core, 0, ())
    assert (step.outputs, step.stats.counters.dummy_steps) == ({}, 1)
    core.handle(request(1, max_tokens=1))
    assert step_together(core, 1, ()).stats.counters.dummy_steps == 1
    assert [len(plan.slots) for plan in executor.plans] == [0, 1]


def test_step_with_held_prefill_is_an_empty_batch() -> None:
    executor = BreakingExecutor(set())
    core = member(executor, HoldUntil(1))
    core.handle(request(1, max_tokens=1))
    assert step_together(core, 0, ()).stats.counters.dummy_steps == 1
    assert core.needs_steps
    assert len(step_together(core, 1, ()).outputs[0]) == 1


@pytest.mark.parametrize("policy", ["none", "balance", "cadence", "level"])
def test_suspect_runs_exclusively_on_its_rank_under_any_policy(policy: str) -> None:
    scheduling = msgspec.structs.replace(CONFIG.scheduler, admission_policy=policy)
    executor = BreakingExecutor({3})
    config = msgspec.structs.replace(CONFIG, scheduler=scheduling)
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    exchanges = core.steps.joined_group(2)
    other = RankState(2, 1, 16, 20, decodes=2, ready_prefill_tokens=16, ready_prefills=1)
    core.handle(request(1, max_tokens=30))
    core.handle(msgspec.structs.replace(request(2, length=6, max_tokens=30), exclusive_steps=4))
    alone = []
    for number in range(300):
        if not core.needs_steps:
            break
        reported = core.stats().exclusive_request
        try:
            own = core.steps.rank_state(1000)
            # A gather contains the loads of all ranks, even if the policy ignores them.
            gathers = exchanges or number % 4 == 0
            step_together(core, number, (own, other) if gathers else ())
        except GroupBroken:
            continue
        if reported:
            alone.append(executor.plans[-1])
    assert not core.needs_steps
    assert sum(plan.num_tokens for plan in alone) == 6 + 3, "its prompt and the rest of four steps"
    assert all(len(plan.slots) <= 1 for plan in alone)


def test_request_can_be_aborted_while_its_step_waits_for_next_group() -> None:
    core = member(BreakingExecutor({2}))
    core.handle(request(1, max_tokens=6))
    step_together(core, 0, ())
    with pytest.raises(GroupBroken):
        step_together(core, 1, ())
    core.handle(AbortRequests([1]))
    assert core.needs_steps, "the rest of the step"
    assert step_together(core, 0, ()).outputs == {}
    assert not core.needs_steps
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)


def test_only_policies_that_compare_ranks_get_loads() -> None:
    core = member(BreakingExecutor(set()))
    core.handle(request(1))
    assert core.steps.rank_state(0) == NO_LOAD
    assert core.steps.joined_group(2), "level is what groups use"
    assert core.steps.rank_state(7).waiting == 1
    assert core.steps.rank_state(7).last_step_us == 7
