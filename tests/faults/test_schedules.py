"""Nothing is lost in thousands of simulated fault schedules."""

import pytest

from tests.faults.oracle import answer
from tests.faults.parts import Parts
from tests.faults.plan import KINDS, draw_plan
from tests.faults.run import run_seeds
from tests.faults.world import World

SCHEDULES = 100
"""As many as a test run can afford; `python -m tests.faults.run` runs ten thousand and more."""
CHUNK = 50


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(CHUNK, SCHEDULES, CHUNK))],
)
def test_all_invariants_hold_in_every_schedule(first: int) -> None:
    failures = run_seeds(range(first, first + CHUNK))
    assert not failures, "\n".join(map(str, failures[:10]))


def test_blocks_are_transferred_with_some_lost() -> None:
    hits = failures = 0
    for seed in [each for each in range(60) if draw_plan(each).splits]:
        world = World(draw_plan(seed), Parts())
        world.run()
        for engine in world._all_engines.values():
            if engine.blocks is not None and engine.tiers is not None:
                hits += engine.tiers.counters.kv_transfer_hits
                failures += engine.blocks.port._counters.kv_transfer_failures
    assert hits > 100
    assert failures > 3


def test_schedules_cover_every_fault_and_kind_of_request() -> None:
    plans = [draw_plan(seed) for seed in range(300)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(KINDS)
    asks = [ask for plan in plans for ask in plan.asks]
    sampling = [ask.sampling for ask in asks]
    assert any(ask.is_poison for ask in asks)
    assert any(ask.leaves_after is not None for ask in asks)
    assert any(each.presence_penalty for each in sampling)
    assert any(each.logprobs for each in sampling)
    assert any(each.prompt_logprobs for each in sampling)
    assert any(each.stop_token_ids for each in sampling)
    ends = {answer(ask.prompt, ask.sampling)[1] for ask in asks}
    assert ends == {"stop", "length"}
