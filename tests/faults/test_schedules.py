"""Nothing is lost, whatever goes wrong: thousands of simulated fault schedules."""

import pytest

from tests.faults.oracle import answer
from tests.faults.plan import KINDS, draw_plan
from tests.faults.run import run_seeds

SCHEDULES = 300
"""As many as every test run can afford; `python -m tests.faults.run` runs ten thousand and more."""
CHUNK = 50


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(CHUNK, SCHEDULES, CHUNK))],
)
def test_every_promise_is_kept_in_every_schedule(first: int) -> None:
    failures = run_seeds(range(first, first + CHUNK))
    assert not failures, "\n".join(map(str, failures[:10]))


def test_a_schedule_is_the_same_in_every_run() -> None:
    assert draw_plan(11) == draw_plan(11)
    assert draw_plan(11) != draw_plan(12)


def test_schedules_hold_every_fault_and_every_kind_of_request() -> None:
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
