"""Lockstep group steps that are launched while the previous one runs."""

import pytest

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import PendingResult
from engine.core.engine_core import EngineCore
from engine.distributed.spec import GroupBroken
from engine.shared.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.shared.messages import AbortRequests, AddRequest, SamplingParams, UtilityCall
from tests.support.checked_executor import CheckedExecutor

CONFIG = EngineConfig(
    model=ModelConfig(max_model_len=64),
    cache=CacheConfig(block_size=4, num_kv_blocks=32),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=True),
)


class Later:
    """A step that is computed when its result is fetched, as if in another thread."""

    def __init__(self, executor: "LateExecutor", plan: BatchPlan) -> None:
        self._executor = executor
        self._plan = plan
        self._outcome: BatchResult | GroupBroken | None = None

    def result(self) -> BatchResult:
        if self._outcome is None:
            self._outcome = self._executor.compute(self._plan)
        if isinstance(self._outcome, GroupBroken):
            raise self._outcome
        return self._outcome


class LateExecutor(CheckedExecutor):
    """Computes steps lazily; from a given step on they fail, until a new group is formed."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.plans: list[BatchPlan] = []
        self.breaks_in = -1
        self._computed = 0

    def submit(self, plan: BatchPlan) -> PendingResult:
        self.plans.append(plan)
        return Later(self, plan)

    def compute(self, plan: BatchPlan) -> BatchResult | GroupBroken:
        if self._computed == self.breaks_in:
            return GroupBroken("a member died")
        self._computed += 1
        return super().submit(plan).result()


class Member:
    """An engine of a group and the tokens of its requests."""

    def __init__(self, executor: LateExecutor) -> None:
        self.executor = executor
        self.core = EngineCore(CONFIG, executor, rank=0, incarnation=1)
        self.core.front_end_joined(0, 1)
        self.tokens: list[int] = []
        self._number = 0

    def launch(self) -> None:
        self.core.steps.launch_together(self._number, ())
        self._number += 1

    def land(self) -> None:
        self._take(self.core.land_together().outputs)

    def abandon_pending(self) -> None:
        self.core.steps.abandon_pending()
        answers = self.core.answers()
        if answers is not None:
            self._take(answers.outputs)

    def finish(self, in_flight: int = 2) -> None:
        """Step until idle, with this many steps launched before the first completes."""
        while self.core.needs_steps:
            self.launch()
            if len(self.core.steps.in_flight) == in_flight:
                self.land()
        while self.core.steps.in_flight:
            self.land()

    def _take(self, outputs: object) -> None:
        assert isinstance(outputs, dict)
        self.tokens += [token for output in outputs.get(0, []) for token in output.token_ids]


def request(max_tokens: int) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return AddRequest(1, "request-1", 0, 0, list(range(20)), sampling)


@pytest.fixture
def member() -> Member:
    return Member(LateExecutor())


def test_nothing_is_launched_for_a_last_token_in_flight(member: Member) -> None:
    member.core.handle(request(max_tokens=3))
    member.finish()
    # Two prefill steps, the second of which samples, and two decode steps.
    assert [plan.num_tokens for plan in member.executor.plans] == [16, 4, 1, 1]
    assert len(member.tokens) == 3
    assert member.core.stats().counters.dummy_steps == 0


@pytest.mark.parametrize("breaks_in", range(6))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_abandoned_steps_are_launched_again_in_order(breaks_in: int, in_flight: int) -> None:
    undisturbed, member = Member(LateExecutor()), Member(LateExecutor())
    for each in (undisturbed, member):
        each.core.handle(request(max_tokens=6))
    undisturbed.finish()

    member.executor.breaks_in = breaks_in
    with pytest.raises(GroupBroken):
        member.finish(in_flight)
    kept = list(member.executor.plans)
    member.abandon_pending()
    assert member.core.needs_steps
    member.executor.breaks_in = -1
    given_up = [each.plan for each in member.core.steps.in_flight]
    assert given_up == kept[breaks_in:]
    member.finish()
    again = member.executor.plans[len(kept) :]
    assert all(one is other for one, other in zip(given_up, again, strict=False))
    assert member.tokens == undisturbed.tokens
    stats = member.core.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)


def test_available_results_are_kept_when_group_ends(member: Member) -> None:
    member.core.handle(request(max_tokens=6))
    member.launch()
    member.launch()
    member.executor.breaks_in = 1
    member.abandon_pending()
    assert [each.plan for each in member.core.steps.in_flight] == member.executor.plans[1:]
    member.executor.breaks_in = -1
    member.launch()
    member.land()
    assert len(member.tokens) == 1
    assert [plan.num_tokens for plan in member.executor.plans] == [16, 4, 4]


def test_engine_does_not_sleep_with_abandoned_steps(member: Member) -> None:
    member.launch()  # empty
    member.core.handle(request(max_tokens=6))
    member.launch()
    member.executor.breaks_in = 0
    member.abandon_pending()
    member.core.handle(UtilityCall(1, 0, "sleep"))
    answers = member.core.answers()
    assert answers is not None
    [(_, result)] = answers.utility_results
    assert "finished first" in str(result.error)
    assert not member.core.halting.is_sleeping


def test_draining_engine_waits_only_for_rows_in_flight(member: Member) -> None:
    member.core.handle(request(max_tokens=1))
    member.launch()
    member.launch()
    member.core.handle(AbortRequests([1]))
    assert member.core.has_requests, "its rows are computed"
    member.land()
    member.land()
    assert not member.core.has_requests
    member.launch()
    assert member.core.steps.in_flight
    assert not member.core.has_requests, "the others need the step"
