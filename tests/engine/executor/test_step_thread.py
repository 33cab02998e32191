"""Steps in a separate thread: recovery after the loss of a group."""

from collections.abc import Iterator

import pytest
import torch

from engine.batch.batch import BatchPlan, BatchResult
from engine.distributed.spec import GroupBroken
from engine.executor.step_thread import StepThread


def empty_plan(step: int) -> BatchPlan:
    return BatchPlan(step, [], [], [], [], [], [])


@pytest.fixture
def thread() -> Iterator[StepThread]:
    made = StepThread(torch.device("cpu"), own_thread=True)
    yield made
    made.shutdown()


@pytest.mark.parametrize("error", [GroupBroken("a member died"), ValueError("no such token")])
def test_no_step_follows_a_failed_step_in_group(thread: StepThread, error: Exception) -> None:
    ran = []

    def run(plan: BatchPlan) -> BatchResult:
        ran.append(plan.step)
        if ran == [0, 1]:
            raise error
        return BatchResult([plan.step])

    thread.regroup()
    pending = [thread.submit(run, empty_plan(step)) for step in range(4)]
    assert pending[0].result().token_ids == [0]
    for each in pending[1:]:
        with pytest.raises(type(error)) as raised:
            each.result()
        assert raised.value is error
    thread.regroup()
    assert thread.submit(run, empty_plan(1)).result().token_ids == [1]
    assert ran == [0, 1, 1]
