import time
from typing import Literal

import pytest

from engine.batch.batch import BatchPlan, SlotBlocks, SlotStart
from engine.executor.simulated import SimulatedExecutor, simulated_token
from engine.shared.config import CacheConfig, EngineConfig, ExecutorConfig
from engine.shared.messages import SamplingParams
from tests.support.checked_executor import CheckedExecutor


def executor(
    timing: Literal["real", "virtual"] = "virtual", *, step_us: int = 500, token_us: int = 10
) -> SimulatedExecutor:
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_kv_blocks=8),
        executor=ExecutorConfig(simulated_step_us=step_us, simulated_token_us=token_us),
    )
    return CheckedExecutor(config, timing=timing)


def start(
    step: int, slot: int, token_ids: list[int], block_ids: list[int], *, computed: int = 0
) -> BatchPlan:
    """A plan that starts one sequence and computes all of it that is not `computed`."""
    sampling = SamplingParams(max_tokens=9, seed=7)
    count = len(token_ids) - computed
    return BatchPlan(
        step,
        [SlotStart(slot, token_ids, len(token_ids), sampling)],
        [SlotBlocks(slot, 0, block_ids)],
        [slot],
        [computed],
        [count],
        [True],
    )


def decode(step: int, slot: int, position: int) -> BatchPlan:
    return BatchPlan(step, [], [], [slot], [position], [1], [True])


def test_simulated_executor_has_default_cache_and_vocabulary() -> None:
    info = SimulatedExecutor(EngineConfig(), timing="virtual").info
    assert (info.num_kv_blocks, info.max_model_len, info.vocab_size) == (4096, 4096, 32_000)
    assert info.eos_token_ids == ()


def test_a_token_is_a_function_of_seed_position_and_previous_token() -> None:
    assert simulated_token(7, 3, 2, 1000) == simulated_token(7, 3, 2, 1000)
    others = [(8, 3, 2), (7, 4, 2), (7, 3, 1)]
    assert all(
        simulated_token(*other, 1 << 40) != simulated_token(7, 3, 2, 1 << 40) for other in others
    )
    drawn = [simulated_token(seed, 5, 2, 10) for seed in range(2000)]
    assert all(150 < drawn.count(token) < 250 for token in range(10))


def test_drawn_tokens_are_fed_back() -> None:
    run = executor()
    first = run.submit(start(1, 0, [1, 2, 3], [5])).result().token_ids[0]
    assert first == simulated_token(7, 3, 3, 32_000)
    second = run.submit(decode(2, 0, 3)).result().token_ids[0]
    assert second == simulated_token(7, 4, first, 32_000)


FOUR = [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("plans", "error"),
    [
        ([start(1, 0, FOUR, [5]), start(2, 1, [*FOUR, 5], [6, 7], computed=4)], "block 6"),
        (
            [
                start(1, 0, FOUR, [5]),
                start(2, 1, [*FOUR, 9], [5, 6], computed=4),
                start(3, 2, [1, 2, 3, 5, 9], [5, 7], computed=4),
            ],
            "other tokens",
        ),
        ([start(1, 0, [3] * 8, [5, 6]), start(2, 1, [3] * 9, [6, 5, 7], computed=8)], "has others"),
        ([start(1, 0, [1, 2, 3], [5, 6]), decode(2, 0, 2)], "does not fit 4 tokens"),
        ([start(1, 0, [1, 2, 3], [5, 6]), decode(2, 0, 4)], "does not fit 4 tokens"),
        (
            [
                start(1, 0, [1, 2, 3], [5]),
                BatchPlan(2, [], [SlotBlocks(0, 2, [6])], [0], [3], [1], [True]),
            ],
            "gap",
        ),
    ],
    ids=["wrong block", "another prefix", "shifted block", "too early", "too late", "gap"],
)
def test_plan_that_does_not_fit_the_cache_is_noticed(plans: list[BatchPlan], error: str) -> None:
    run = executor()
    for plan in plans[:-1]:
        run.submit(plan).result()
    with pytest.raises(AssertionError, match=error):
        run.submit(plans[-1])


def test_block_written_by_step_in_flight_must_not_be_reassigned() -> None:
    run = executor()
    pending = run.submit(start(1, 0, [1, 2, 3], [5]))
    with pytest.raises(AssertionError, match="written by slot 0"):
        run.submit(start(2, 1, [1, 2, 3], [5]))
    pending.result()
    run.submit(start(3, 2, [1, 2, 3], [6])).result()


def test_slot_used_by_step_in_flight_must_not_be_reassigned() -> None:
    run = executor()
    run.submit(start(1, 0, [1, 2, 3], [5]))
    with pytest.raises(AssertionError, match="slot 0 is in use"):
        run.submit(start(2, 0, [1, 2, 3], [6]))


def test_virtual_time_is_the_sum_of_all_costs() -> None:
    run = executor("virtual", step_us=500, token_us=10)
    run.submit(start(1, 0, [1, 2, 3], [5])).result()
    run.submit(BatchPlan(2, [], [], [], [], [], [])).result()
    assert run.virtual_us == 500 + 30 + 500


def test_steps_are_submitted_without_waiting_for_their_cost() -> None:
    run = executor("real", step_us=3_600_000_000, token_us=0)
    run.submit(start(1, 0, [1, 2, 3], [5]))
    run.submit(decode(2, 0, 3))
    run.shutdown()


def test_in_real_time_steps_follow_each_other_and_take_their_cost() -> None:
    run = executor("real", step_us=100_000, token_us=0)
    started_at = time.monotonic()
    first = run.submit(start(1, 0, [1, 2, 3], [5]))
    second = run.submit(decode(2, 0, 3))
    first.result()
    second.result()
    assert time.monotonic() - started_at >= 0.2
    run.shutdown()
    run.shutdown()
