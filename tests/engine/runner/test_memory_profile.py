"""The largest step, and the device memory that remains."""

import pytest

from engine.runner.memory_profile import free_for_cache, heaviest_plan
from tests.engine.fixtures import LoadDriver, SaveModel


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "length"), [(4, 100, 256), (8, 5, 256), (2, 900, 100), (1, 64, 64)]
)
def test_heaviest_plan_has_all_tokens_and_samples(
    max_num_seqs: int, budget: int, length: int
) -> None:
    plan, num_blocks = heaviest_plan(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=length,
        block_size=8,
    )
    assert plan.num_tokens == min(budget, max_num_seqs * length)
    assert len(plan.slots) == sum(plan.samples) == min(max_num_seqs, budget)
    assert max(plan.counts) <= length
    taken = [block for blocks in plan.blocks for block in blocks.block_ids]
    assert taken == list(range(num_blocks))


def test_model_can_run_heaviest_plan(checkpoint: SaveModel, driver: LoadDriver) -> None:
    engine = driver(checkpoint("llama").directory)
    plan, num_blocks = heaviest_plan(
        max_num_seqs=8, max_num_batched_tokens=300, max_model_len=256, block_size=8
    )
    assert num_blocks <= len(engine.runner._cache[0])
    assert len(engine.runner.run(plan).token_ids) == 8


def test_cache_gets_remaining_memory() -> None:
    gib = 2**30
    left = free_for_cache(total=80 * gib, utilization=0.9, peak=20 * gib, others=gib)
    assert left == 51 * gib
    assert free_for_cache(total=8 * gib, utilization=0.5, peak=4 * gib, others=gib) == 0
