"""Nothing is lost, whatever goes wrong: thousands of simulated fault schedules."""

import multiprocessing
import os

import pytest

from tests.faults.oracle import answer
from tests.faults.plan import KINDS, draw_plan
from tests.faults.run import run_seeds

SCHEDULES = 1500
"""As many as a test run can afford; `python -m tests.faults.run` runs ten thousand and more."""
_CHUNK = 50


def run_chunk(first: int) -> list[str]:
    return [str(failure) for failure in run_seeds(range(first, first + _CHUNK))]


@pytest.mark.timeout(300)
def test_every_promise_is_kept_in_every_schedule() -> None:
    workers = min(2, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        chunks = pool.map(run_chunk, range(0, SCHEDULES, _CHUNK), chunksize=1)
    failures = [failure for chunk in chunks for failure in chunk]
    assert not failures, "\n".join(failures[:10])


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
