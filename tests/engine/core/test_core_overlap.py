"""Steps that are planned while the previous one runs."""

import logging
from collections.abc import Sequence

import msgspec
import pytest

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import ExecutorInfo, PendingResult
from engine.core.engine_core import EngineCore
from engine.core.steps import StepFailed
from engine.scheduler.admission import Grant, PolicyFailed, RankState
from engine.shared.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.shared.messages import AbortRequests, AddRequest, SamplingParams
from tests.engine.core.traffic import request, serve
from tests.support.checked_executor import CheckedExecutor


def config(overlap: bool) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=64),
        cache=CacheConfig(block_size=4, num_kv_blocks=24),
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=overlap
        ),
    )


class WatchedExecutor:
    """Records submitted steps and fetched results; can fail in one step."""

    def __init__(self, settings: EngineConfig, fails_in: int = -1) -> None:
        self._executor = CheckedExecutor(settings, vocab_size=40, eos_token_ids=(0,))
        self._fails_in = fails_in
        self.events: list[tuple[str, int]] = []

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    @property
    def grammars(self) -> None:
        return None

    @property
    def adapters(self) -> None:
        return None

    def submit(self, plan: BatchPlan) -> PendingResult:
        self.events.append(("submit", plan.step))
        return _Watched(self, plan.step, self._executor.submit(plan), plan.step == self._fails_in)

    def shutdown(self) -> None:
        self._executor.shutdown()


class _Watched:
    def __init__(
        self, watcher: WatchedExecutor, step: int, pending: PendingResult, fails: bool
    ) -> None:
        self._watcher, self._step, self._pending, self._fails = watcher, step, pending, fails

    def result(self) -> BatchResult:
        self._watcher.events.append(("result", self._step))
        if self._fails:
            raise RuntimeError("the device is gone")
        return self._pending.result()


def engine(overlap: bool = True, fails_in: int = -1) -> tuple[EngineCore, WatchedExecutor]:
    settings = config(overlap)
    executor = WatchedExecutor(settings, fails_in)
    core = EngineCore(settings, executor, rank=0, incarnation=1)  # type: ignore[arg-type]
    core.front_end_joined(0, 1)
    return core, executor


def test_step_is_submitted_before_previous_result_is_fetched() -> None:
    core, executor = engine()
    core.handle(request(1, 5, 3))
    given = []
    while core.has_work:
        outputs = core.step().outputs
        given.append([output.token_ids for output in outputs.get(0, [])])
    submits_and_results = [
        ("submit", 1), ("submit", 2), ("result", 1), ("submit", 3), ("result", 2), ("result", 3)
    ]  # fmt: skip
    assert executor.events == submits_and_results
    assert [len(tokens) for tokens in given] == [0, 1, 1, 1]


def test_without_overlap_each_result_is_fetched_at_once() -> None:
    core, executor = engine(overlap=False)
    core.handle(request(1, 5, 2))
    while core.has_work:
        core.step()
    assert executor.events == [("submit", 1), ("result", 1), ("submit", 2), ("result", 2)]


def test_result_is_fetched_immediately_if_nothing_can_be_launched() -> None:
    core, executor = engine()
    core.handle(request(1, 5, 1))
    assert core.step().outputs == {}
    [output] = core.step().outputs[0]
    assert output.finish_reason == "length"
    assert not core.has_work
    assert executor.events == [("submit", 1), ("result", 1)]


def test_steps_in_flight_are_fetched_after_all_requests_are_aborted() -> None:
    core, executor = engine()
    core.handle(request(1, 5, 30))
    core.step()
    core.step()
    core.handle(AbortRequests([1]))
    assert core.has_work, "a step still uses its blocks"
    assert core.step().outputs == {}
    assert not core.has_work
    assert core.stats().kv_usage == 0
    assert executor.events[-1] == ("result", 2)


def test_a_failed_step_is_described_and_raised(caplog: pytest.LogCaptureFixture) -> None:
    core, _ = engine(overlap=False, fails_in=2)
    core.handle(request(17, 6, 9))
    core.step()
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(StepFailed, match="engine 0: RuntimeError") as failure,
    ):
        core.step()
    assert isinstance(failure.value.__cause__, RuntimeError)
    assert "step 2: 1 rows, 1 tokens" in caplog.text
    assert "17 (request-17): slot 0, start 6, count 1, 8 tokens, 2 blocks" in caplog.text


class _Undecided:
    exchanges = False

    def decide(self, step: int, table: Sequence[RankState]) -> Grant:
        raise PolicyFailed("--admission-policy mine failed: KeyError: 'x'")


def test_a_step_that_fails_by_its_admission_policy_names_the_policy() -> None:
    core, _ = engine(overlap=False)
    core.steps._admission = _Undecided()
    core.handle(request(17, 6, 9))
    with pytest.raises(StepFailed, match="engine 0: --admission-policy mine failed: KeyError"):
        core.step()


def test_a_failed_step_is_described_with_the_one_launched_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, _ = engine(fails_in=2)
    core.handle(request(7, 6, 9))
    core.step()
    core.step()
    with caplog.at_level(logging.ERROR), pytest.raises(StepFailed, match="RuntimeError"):
        core.step()
    assert "2 plan(s) in flight" in caplog.text
    assert "step 2: 1 rows" in caplog.text
    assert "step 3: 1 rows" in caplog.text


@pytest.mark.parametrize("seed", range(5))
def test_overlap_changes_no_token_and_no_end(seed: int) -> None:
    apart, overlapped = (serve(engine(overlap)[0], seed, 60) for overlap in (False, True))
    assert apart[:2] == overlapped[:2]
    assert apart[2] > 0
    assert overlapped[2] > 0
    assert {"length", "stop", "abort"} == set(apart[1].values())


def test_draft_tokens_disable_step_overlap(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    drafting = msgspec.structs.replace(config(True).scheduler, speculative_ngram=3)
    settings = msgspec.structs.replace(config(True), scheduler=drafting)
    executor = WatchedExecutor(settings)
    core = EngineCore(settings, executor, rank=0, incarnation=1)  # type: ignore[arg-type]
    core.front_end_joined(0, 1)
    core.handle(AddRequest(1, "1", 0, 0, [1, 2, 3], SamplingParams(max_tokens=9, seed=1)))
    while core.has_work:
        core.step()
    kinds = [kind for kind, _ in executor.events]
    assert kinds[:4] == ["submit", "result"] * 2
    assert "steps do not overlap" in caplog.text
