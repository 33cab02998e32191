"""Utilities: pausing, sleeping and profiling an engine, and invalid calls."""

import logging
import time
from pathlib import Path

import pytest

from engine.batch.batch import BatchPlan
from engine.batch.executor import CannotDo
from engine.core.engine_core import EngineCore
from engine.core.steps import StepFailed
from engine.executor.simulated import simulated_token
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import (
    PUSHED,
    AddRequest,
    FleetOrder,
    SamplingParams,
    UtilityCall,
    UtilityResult,
    UtilityValue,
    WeightsSource,
)
from engine.shared.pooling import PoolingSpec
from tests.support.checked_executor import CheckedExecutor
from tests.support.waiting import PATIENCE


class Executor(CheckedExecutor):
    """Records operator calls; those in `refuses` raise."""

    def __init__(self, config: EngineConfig, pooling: PoolingSpec | None) -> None:
        super().__init__(config, pooling=pooling)
        self.calls: list[object] = []
        self.refuses: dict[str, Exception] = {}
        self.takes = 0.0
        """Duration in seconds of falling asleep and of waking up."""

    def _note(self, name: str, *arguments: object) -> None:
        self.calls.append((name, *arguments))
        if name in self.refuses:
            raise self.refuses[name]

    def submit(self, plan: BatchPlan):  # type: ignore[no-untyped-def]
        self._note("submit")
        return super().submit(plan)

    def sleep(self, level: int) -> None:
        self._note("sleep", level)
        time.sleep(self.takes)
        super().sleep(level)

    def wake_up(self, *, kv_cache: bool = True) -> None:
        self._note("wake_up")
        time.sleep(self.takes)

    def start_profile(self) -> None:
        self._note("start_profile")

    def stop_profile(self, path: Path) -> None:
        self._note("stop_profile", path)


class Engine:
    """A core with two front ends."""

    def __init__(
        self,
        *,
        overlap: bool,
        profile_dir: str | None = None,
        pooling: PoolingSpec | None = None,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(max_model_len=64),
            cache=CacheConfig(block_size=4, num_kv_blocks=32),
            scheduler=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=overlap
            ),
            executor=ExecutorConfig(torch_profiler_dir=profile_dir),
        )
        self.executor = Executor(config, pooling)
        self.core = EngineCore(config, self.executor, rank=3, incarnation=0xABC)
        self.core.front_end_joined(0, 100)
        self.tokens: dict[int, list[int]] = {}

    def add(self, id: int, *, length: int = 5, max_tokens: int = 6) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, seed=id)
        self.core.handle(AddRequest(id, f"r{id}", 0, 0, list(range(length)), sampling))
        self.tokens[id] = []

    def step(self) -> list[UtilityResult]:
        step = self.core.step()
        for output in step.outputs.get(0, []):
            self.tokens[output.id] += output.token_ids
        return [result for _, result in step.utility_results]

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def call(self, name: str, arguments: dict[str, UtilityValue] | None = None) -> UtilityResult:
        self.core.handle(UtilityCall(9, 0, name, arguments or {}))
        [result] = self.step()
        assert (result.call_id, result.rank) == (9, 3)
        return result

    def assert_complete(self) -> None:
        for id, tokens in self.tokens.items():
            expected = list(range(5))
            for _ in range(6):
                expected.append(simulated_token(id, len(expected), expected[-1], 32_000))
            assert tokens == expected[5:]
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)


@pytest.fixture(params=[False, True], ids=["apart", "overlapped"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(overlap=request.param)


# -- steps without requests -----------------------------------------------------------------------


def test_dummy_batch_produces_no_tokens(engine: Engine) -> None:
    for number in range(2):
        assert engine.call("execute_dummy_batch").result == {"step": number}
        engine.run()
    assert engine.core.steps.count == engine.executor.calls.count(("submit",)) == 2
    engine.add(1)
    engine.step()
    engine.call("execute_dummy_batch")
    assert engine.core.stats().running == 1, "requests have steps computed anyway"
    engine.run()
    engine.assert_complete()


@pytest.mark.parametrize("halt", ["pause", "sleep"])
def test_halted_engine_refuses_dummy_batch(engine: Engine, halt: str) -> None:
    engine.call(halt)
    assert "resume it" in (engine.call("execute_dummy_batch").error or "")
    assert not engine.core.has_work


def test_pooling_model_computes_dummy_batches() -> None:
    engine = Engine(overlap=False, pooling=PoolingSpec(task="embed", pooling="last", size=8))
    assert engine.call("get_supported_tasks").result == {"tasks": "embed"}
    engine.call("execute_dummy_batch")
    engine.run()
    assert engine.core.steps.count == 1
    assert engine.core.stats().counters.pooled_sequences == 1


# -- pause ----------------------------------------------------------------------------------------


def test_paused_engine_queues_requests_and_runs_them_after_resume(engine: Engine) -> None:
    engine.add(1)
    engine.step()
    engine.step()
    assert engine.call("pause").result == {"is_paused": True}
    engine.run()  # the step that was in flight, if any
    launched = engine.executor.calls.count(("submit",))
    engine.add(2)
    assert not engine.core.has_work, "the loop has to sleep"
    stats = engine.core.stats()
    assert stats.halted
    assert (stats.running, stats.waiting) == (1, 1)
    assert engine.executor.calls.count(("submit",)) == launched
    assert engine.call("resume").result == {"is_paused": False}
    assert not engine.core.stats().halted
    engine.run()
    engine.assert_complete()


def test_engine_without_trainer_weights_accepts_no_requests(engine: Engine) -> None:
    def order(revision: int, weights: WeightsSource | None) -> bool:
        engine.core.handle(FleetOrder(revision, weights=weights))
        engine.step()
        stats = engine.core.stats()
        assert stats.halted == stats.hands_over
        return stats.halted

    assert not order(1, engine.core.operations.weights)
    assert order(2, WeightsSource(PUSHED, None, "400"))
    assert engine.call("resume").error is None
    assert engine.core.stats().halted, "no resumption gives it weights"
    engine.core.operations.weights = WeightsSource(PUSHED, None, "401")
    assert not order(3, WeightsSource(PUSHED, None, "401"))


def test_sleep_does_not_drop_unreloadable_weights(engine: Engine) -> None:
    engine.core.operations.weights = WeightsSource(PUSHED, None, "400")
    refused = engine.call("sleep", {"level": 2}).error
    assert refused is not None
    assert "sleep at level 1" in refused
    assert not engine.core.stats().halted
    assert engine.call("sleep", {"level": 1}).error is None


@pytest.mark.parametrize("halt", ["pause", "sleep"])
def test_all_front_ends_are_notified_immediately_of_halted_engine(
    engine: Engine, halt: str
) -> None:
    engine.core.front_end_joined(1, 101)
    end = {"pause": "resume", "sleep": "wake_up"}[halt]
    for name, halted in ((halt, True), (end, False)):
        engine.core.handle(UtilityCall(9, 0, name, {}))
        step = engine.core.step()
        assert step.stats.halted == halted
        assert {index: outputs for index, outputs in step.outputs.items()} == {0: [], 1: []}
        assert [each.outputs for each in step.stats.received] == [1 + (not halted)] * 2


def test_requests_are_handed_over_only_if_operator_requests_it(engine: Engine) -> None:
    engine.call("pause", {"mode": "move"})
    assert engine.core.stats().hands_over
    engine.call("sleep")
    engine.call("resume")
    assert engine.core.stats().hands_over, "still halted"
    engine.call("wake_up")
    assert not engine.core.stats().hands_over
    engine.call("pause")
    assert not engine.core.stats().hands_over


def test_all_front_ends_are_notified_of_suspect_before_first_step(engine: Engine) -> None:
    engine.core.front_end_joined(1, 101)
    engine.add(1)
    engine.step()
    sampling = SamplingParams(max_tokens=6, seed=2)
    engine.core.handle(AddRequest(2, "r2", 0, 0, list(range(5)), sampling, exclusive_steps=2))
    engine.tokens[2] = []
    submitted = 0
    for _ in range(10):
        submitted = engine.executor.calls.count(("submit",))
        step = engine.core.step()
        for output in step.outputs.get(0, []):
            engine.tokens[output.id] += output.token_ids
        if step.exclusive_changes:
            break
    assert step.stats.exclusive_request == 2
    assert set(step.outputs) == {0, 1}
    assert engine.executor.calls.count(("submit",)) == submitted
    engine.run()
    assert engine.core.stats().exclusive_request == 0
    engine.assert_complete()


def test_a_paused_engine_answers_utilities_and_refusals(engine: Engine) -> None:
    engine.call("pause")
    result = engine.call("info").result
    assert isinstance(result, dict)
    assert (result["is_paused"], result["is_sleeping"]) == (True, False)
    engine.add(5, length=200)
    assert engine.core.has_work
    [answer] = engine.core.step().outputs[0]
    assert answer.finish_reason == "error"


def test_pause_with_wait_finishes_running_requests_and_starts_none(engine: Engine) -> None:
    for number in range(1, 7):
        engine.add(number)
    for _ in range(3):
        engine.step()
    running = engine.core.stats().running
    assert 0 < running < 6
    assert engine.call("pause", {"mode": "wait"}).result == {"is_paused": False}
    assert engine.core.stats().halted, "nothing new is routed here"
    engine.run()
    assert not engine.core.has_requests, "an engine that drains may end"
    info = engine.call("info").result
    assert isinstance(info, dict)
    assert info["is_paused"]
    stats = engine.core.stats()
    assert (stats.running, stats.waiting) == (0, 6 - running)
    engine.call("resume")
    engine.run()
    engine.assert_complete()


def test_a_pause_that_aborts_notifies_all_waiting_callers(engine: Engine) -> None:
    for number in range(1, 7):
        engine.add(number)
    engine.step()
    engine.core.handle(UtilityCall(9, 0, "pause", {"mode": "abort"}))
    reasons = {}
    while engine.core.has_work:
        for output in engine.core.step().outputs.get(0, []):
            reasons[output.id] = output.finish_reason
    assert reasons == dict.fromkeys(range(1, 7), "abort")
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)
    engine.tokens = {}
    engine.add(7)
    engine.call("resume")
    engine.run()
    engine.assert_complete()


def test_fleet_order_is_carried_out_once(engine: Engine) -> None:
    order = FleetOrder(3, pause="keep", pause_revision=3)
    engine.core.handle(order)
    info = engine.call("info").result
    assert isinstance(info, dict)
    assert (info["is_paused"], info["fleet_revision"]) == (True, 3)
    engine.call("resume")
    engine.core.handle(order)
    assert not engine.core.stats().halted


def test_failed_part_of_order_is_not_hidden_by_later_success(engine: Engine) -> None:
    engine.core.handle(FleetOrder(1, sleep_level=2, sleep_revision=1))
    engine.executor.refuses["wake_up"] = CannotDo("the weights have changed")
    engine.core.handle(FleetOrder(3, pause="keep", pause_revision=3, sleep_revision=2))
    info = engine.call("info").result
    assert isinstance(info, dict)
    assert (info["fleet_revision"], info["fleet_error"]) == (3, "the weights have changed")
    assert info["is_paused"]
    engine.core.handle(FleetOrder(4, pause_revision=4, sleep_revision=2))
    info = engine.call("info").result
    assert isinstance(info, dict)
    assert (info["fleet_revision"], info["fleet_error"]) == (4, "")


# -- sleep ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_requests_resume_after_sleep_of_their_engine(engine: Engine, level: int) -> None:
    engine.add(1)
    engine.add(2)
    for _ in range(3):
        engine.step()
    assert engine.call("sleep", {"level": level}).result == {"is_sleeping": True}
    assert engine.executor.calls[-1] == ("sleep", level)
    assert engine.call("is_sleeping").result == {"is_sleeping": True}
    assert not engine.core.has_work
    stats = engine.core.stats()
    assert stats.halted
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 2, 0)
    engine.add(3)
    assert not engine.core.has_work
    assert engine.call("wake_up").result == {"is_sleeping": False}
    engine.run()
    engine.assert_complete()


def test_a_sleep_at_level_0_keeps_everything(engine: Engine) -> None:
    engine.add(1)
    engine.step()
    engine.step()
    engine.call("sleep", {"level": 0})
    engine.run()
    stats = engine.core.stats()
    assert (stats.halted, stats.running) == (True, 1)
    assert ("sleep", 0) not in engine.executor.calls
    engine.call("wake_up")
    engine.run()
    engine.assert_complete()


def test_weights_are_restored_before_the_cache(engine: Engine) -> None:
    engine.add(1)
    engine.call("sleep", {"level": 2})
    error = engine.call("wake_up", {"tags": "kv_cache"}).error
    assert error is not None
    assert "weights first" in error
    assert engine.call("wake_up", {"tags": "weights"}).result == {"is_sleeping": True}
    info = engine.call("info").result
    assert isinstance(info, dict)
    assert info["asleep"] == "kv_cache"
    assert not engine.core.has_work
    assert engine.call("wake_up", {"tags": "kv_cache"}).result == {"is_sleeping": False}
    engine.run()
    engine.assert_complete()


def test_engine_counts_sleeps_and_their_duration(engine: Engine) -> None:
    engine.executor.takes = 0.05
    engine.call("sleep", {"level": 1})
    for tags in ("weights", "kv_cache"):
        engine.call("wake_up", {"tags": tags})
    engine.call("wake_up")  # nothing to restore
    engine.call("sleep", {"level": 0})  # no memory is released
    counters = engine.core.stats().counters
    assert (counters.sleeps, counters.wake_ups) == (1, 2)
    assert 0.05 <= counters.sleep_seconds < PATIENCE
    assert 0.1 <= counters.wake_up_seconds < PATIENCE


def test_cached_prefixes_are_dropped_by_a_sleep(engine: Engine) -> None:
    engine.add(1, length=9)
    engine.run()
    engine.call("sleep")
    engine.call("wake_up")
    assert engine.call("reset_prefix_cache").result == {"blocks_forgotten": 0}


def test_failed_wake_up_reports_reason_and_engine_stays_asleep(engine: Engine) -> None:
    engine.call("sleep", {"level": 2})
    engine.executor.refuses["wake_up"] = CannotDo("the weights have changed")
    assert engine.call("wake_up").error == "the weights have changed"
    assert engine.call("is_sleeping").result == {"is_sleeping": True}
    del engine.executor.refuses["wake_up"]
    engine.call("wake_up")
    assert engine.call("is_sleeping").result == {"is_sleeping": False}


def test_a_pause_outlasts_a_sleep(engine: Engine) -> None:
    engine.add(1)
    engine.call("pause")
    engine.call("sleep")
    engine.call("wake_up")
    assert not engine.core.has_work
    engine.call("resume")
    engine.run()
    engine.assert_complete()


def test_a_step_that_fails_while_the_engine_goes_to_sleep_is_fatal() -> None:
    engine = Engine(overlap=True)
    engine.add(1)
    engine.step()

    class Broken:
        def result(self) -> None:
            raise RuntimeError("the device is gone")

    in_flight = engine.core.steps.in_flight
    in_flight[0] = in_flight[0]._replace(pending=Broken())  # type: ignore[arg-type]
    with pytest.raises(StepFailed, match="RuntimeError"):
        engine.core.handle(UtilityCall(1, 0, "sleep"))


# -- profile --------------------------------------------------------------------------------------


def test_a_profile_is_written_into_the_configured_directory(tmp_path: Path) -> None:
    engine = Engine(overlap=False, profile_dir=str(tmp_path))
    engine.add(1)
    assert engine.call("start_profile").result == {"directory": str(tmp_path)}
    engine.step()
    path = tmp_path / "engine-3-abc-step-2.json.gz"
    result = engine.call("stop_profile").result
    assert isinstance(result, dict)
    assert result["trace"] == str(path)
    assert ("stop_profile", path) in engine.executor.calls


def test_profiling_needs_a_directory(engine: Engine) -> None:
    error = engine.call("start_profile").error
    assert error is not None
    assert "--torch-profiler-dir" in error
    assert engine.executor.calls == []


# -- what can be wrong with a call ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("nothing", {}, "no utility 'nothing'"),
        ("_in_flight", {}, "no utility"),
        ("", {}, "no utility ''"),
        ("sleep", {"level": 3}, "wrong arguments for sleep"),
        ("sleep", {"level": "1"}, "wrong arguments for sleep"),
        ("sleep", {"level": None}, "wrong arguments for sleep"),
        ("sleep", {"depth": 1}, "wrong arguments for sleep"),
        ("wake_up", {"tags": "disk"}, "no tag 'disk'"),
        ("collective_rpc", {"method": "f", "args": "[]", "kwargs": "{}"}, "no callable method 'f'"),
        ("pause", {"mode": "later"}, "wrong arguments for pause"),
    ],
)
def test_a_bad_call_is_answered_and_changes_nothing(
    engine: Engine, name: str, arguments: dict[str, UtilityValue], error: str
) -> None:
    engine.add(1)
    result = engine.call(name, arguments)
    assert result.result is None
    assert result.error is not None
    assert error in result.error
    engine.run()
    engine.assert_complete()


def test_a_utility_that_raises_is_answered_and_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.executor.refuses["sleep"] = OSError("no such device")
    with caplog.at_level(logging.ERROR):
        result = engine.call("sleep")
    assert result.error == "sleep failed: OSError: no such device"
    assert "utility sleep failed" in caplog.text
    assert engine.call("wake_up").result == {"is_sleeping": False}
