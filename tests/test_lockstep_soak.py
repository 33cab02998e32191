"""Many requests at random times to engines that step together: no wake-up is ever missed."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import complete
from tests.support.lockstep import FLAGS, utility, watched, wave_when_paused
from tests.support.metrics import num_running, total
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

REQUESTS = 250
LONGEST_GAP = 0.25
"""Seconds without a new request: long enough for the group to pause, again and again."""


def test_hundreds_of_random_requests_complete_in_lockstep_stack() -> None:
    random_gaps = random.Random(5)
    flags = (*FLAGS, "--data-parallel-size", "3", "--api-server-count", "2")
    with (
        RunningStack(*flags, "--executor", "simulated") as stack,
        ThreadPoolExecutor(16) as clients,
        watched(stack, 250),
    ):
        before = wave_when_paused(stack.url)
        sent: list[Any] = []
        while len(sent) < REQUESTS:
            for _ in range(min(random_gaps.choice((1, 1, 2, 5, 20)), REQUESTS - len(sent))):
                number = len(sent)
                rank = random_gaps.choice((None, 0, 1, 2))
                tokens = random_gaps.randint(1, 12)
                # A text of special tokens alone would be empty without them.
                sent.append(
                    clients.submit(
                        complete,
                        stack.url,
                        f"No. {number}",
                        tokens,
                        rank,
                        skip_special_tokens=False,
                    )
                )
            if random_gaps.random() < 0.6:
                time.sleep(random_gaps.uniform(0, LONGEST_GAP))
            if random_gaps.random() < 0.3:  # however long the machine takes for it
                until(lambda: all(each.done() for each in sent), "all are answered")
                wave_when_paused(stack.url)
        assert all(each.result(PATIENCE) for each in sent)
        after = wave_when_paused(stack.url)
        assert 10 < after - before < REQUESTS, "it paused often, and not for every request"
        infos = utility(stack.url, "info")
        assert {info["wave"] for info in infos.values()} == {after}
        assert len({info["topology"] for info in infos.values()}) == 1
        until(lambda: num_running(stack.url) == 0, "none is left")
        assert total(stack.url, "engine_restarts_total") == 0
