"""Engines that share the experts of a model: real processes that step, pause and wake together."""

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import call, complete, everywhere, fetch
from tests.support.idle import until_idle
from tests.support.lockstep import FLAGS, is_paused, kill, utility, watched, wave_when_paused
from tests.support.metrics import metric, total
from tests.support.waiting import until

pytestmark = pytest.mark.stack


PAIR = (*FLAGS, "--data-parallel-size", "2")


@pytest.fixture(scope="module")
def pair() -> Iterator[RunningStack]:
    with RunningStack(*PAIR) as running:
        yield running


def dummy_steps(url: str) -> dict[int, int]:
    """Return how many dummy batches each engine has run, when its last step has been reported."""
    told: dict[int, int] = {}

    def is_reported() -> bool:
        done = {rank: info["step"] for rank, info in utility(url, "info").items()}
        nothing = {"step": 0, "dummy_steps_total": 0}  # an engine that has not reported yet
        shown = call(f"{url}/status.json")["engines"]
        engines = {each["rank"]: each["counts"] or nothing for each in shown}
        told.update({rank: counts["dummy_steps_total"] for rank, counts in engines.items()})
        return {rank: counts["step"] for rank, counts in engines.items()} == done

    until(is_reported, "the last step is reported")
    return told


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_to_one_engine_makes_the_other_run_dummy_batches(
    pair: RunningStack, rank: int
) -> None:
    before_wave = wave_when_paused(pair.url)
    before = dummy_steps(pair.url)
    complete(pair.url, "To be", 30, rank)
    # If the order to start overtakes the request, the group pauses once more before it comes.
    assert wave_when_paused(pair.url, after=before_wave) - before_wave in (1, 2)
    after = dummy_steps(pair.url)
    dummies = [after[of] - before[of] for of in (0, 1)]
    # They step together: where one computes, the other runs a dummy batch, and after the last token
    # both may do so once more.
    assert dummies[1 - rank] - dummies[rank] == 30, "one for each step of the other"
    assert dummies[1 - rank] <= 31


def test_paused_engines_use_no_processor(pair: RunningStack) -> None:
    complete(pair.url, "Rest", 2)
    wave_when_paused(pair.url)
    until_idle(pair, 0.03)


def test_request_to_any_engine_and_front_end_wakes_the_group(
    pair: RunningStack,
) -> None:
    """A paused group costs a request less than 50 ms more than one that runs."""

    def seconds(number: int) -> float:
        began = time.monotonic()
        complete(pair.url, "Awake", 1, number % 2)  # a new connection: any front end may get it
        return time.monotonic() - began

    with ThreadPoolExecutor() as background:
        long = background.submit(complete, pair.url, "On and on", 150)
        until(lambda: not is_paused(pair.url) or long.done(), "the group runs")
        running = statistics.median(seconds(number) for number in range(6))
        long.result()
    # Other work on the machine delays one request or another, a slow wake-up all of them: each
    # engine has to be woken in time at least once.
    for rank in (0, 1):

        def is_woken_in_time(rank: int = rank) -> bool:
            wave_when_paused(pair.url)
            return seconds(rank) < running + 0.05

        until(is_woken_in_time, f"a request to engine {rank} that is paused is answered in time")


def test_requests_to_held_group_run_after_resume(pair: RunningStack) -> None:
    wave_when_paused(pair.url)
    with watched(pair, 200), ThreadPoolExecutor() as clients:
        busy = clients.submit(complete, pair.url, "Before", 40)
        assert utility(pair.url, "pause") == {0: {"is_paused": True}, 1: {"is_paused": True}}
        assert all(info["is_paused"] for info in utility(pair.url, "info").values())
        held = [clients.submit(complete, pair.url, f"While {i}", 5, i % 2) for i in range(4)]
        until(lambda: total(pair.url, "num_requests_waiting") >= 4, "they wait")
        steps = [info["step"] for info in utility(pair.url, "info").values()]
        time.sleep(0.2)
        assert [info["step"] for info in utility(pair.url, "info").values()] == steps
        assert not any(each.done() for each in held)
        for rank in (0, 1, 1):  # also twice: the second changes nothing
            utility(pair.url, "resume", rank)
        assert [each.result() for each in held] == [
            complete(pair.url, f"While {i}", 5) for i in range(4)
        ]
        busy.result()
    wave_when_paused(pair.url)
    assert not any(info["is_paused"] for info in utility(pair.url, "info").values())


def test_a_group_that_sleeps_wakes_up_together(pair: RunningStack) -> None:
    with watched(pair, 200), ThreadPoolExecutor() as clients:
        told = complete(pair.url, "A dream", 20)
        busy = clients.submit(complete, pair.url, "A dream", 20)
        utility(pair.url, "sleep")
        assert all(info["is_sleeping"] for info in utility(pair.url, "info").values())
        waits = clients.submit(complete, pair.url, "A dream", 20, 0)
        utility(pair.url, "wake_up", 1)
        assert busy.result() == waits.result() == told
        wave_when_paused(pair.url)
        assert not any(info["is_sleeping"] for info in utility(pair.url, "info").values())


def test_a_group_follows_orders_for_all_engines(pair: RunningStack) -> None:
    def order(path: str) -> dict[str, Any]:
        return call(f"{pair.url}{path}", {})

    with watched(pair, 200), ThreadPoolExecutor() as clients:
        told = complete(pair.url, "An order", 30)
        until(
            lambda: everywhere(lambda: total(pair.url, "num_requests_running") == 0),
            "no engine is said to run any",
        )
        busy = [clients.submit(complete, pair.url, "An order", 30, rank) for rank in (0, 1)]
        # What comes after the pause would wait for its end.
        until(
            lambda: all(
                metric(pair.url, "num_requests_running")[str(rank)] >= 1 or busy[rank].done()
                for rank in (0, 1)
            ),
            "they run, or have run",
        )
        order("/pause?mode=wait")
        assert [each.result() for each in busy] == [told] * 2
        waits = clients.submit(complete, pair.url, "An order", 30, 0)
        order("/sleep?level=2&mode=keep")
        order("/wake_up?tags=weights")
        assert all(info["is_sleeping"] for info in utility(pair.url, "info").values())
        order("/wake_up?tags=kv_cache")
        assert not any(info["is_sleeping"] for info in utility(pair.url, "info").values())
        assert not waits.done(), "the pause lasts"
        refused = fetch(f"{pair.url}/admin/weights", {"model": "some/model"})
        assert "--enable-expert-parallel" in refused.error["message"]
        order("/resume")
        assert waits.result() == told
    wave_when_paused(pair.url)


def test_new_coordinator_adopts_existing_group(pair: RunningStack) -> None:
    before = wave_when_paused(pair.url)
    topology = {info["topology"] for info in utility(pair.url, "info").values()}
    with watched(pair, 200), ThreadPoolExecutor() as clients:
        running = clients.submit(complete, pair.url, "Without a head", 100, 0)
        until(lambda: not is_paused(pair.url) or running.done(), "it runs")
        kill(pair, "coordinator")
        running.result()
        sent = clients.submit(complete, pair.url, "Nobody to be asked", 5, 1)
        assert sent.result(), "a request needs no coordinator for long"
        until(lambda: "coordinator" in pair.processes(), "the coordinator is back")
        until(lambda: metric(pair.url, "engines_ready")[""] == 2, "the engines have registered")
        complete(pair.url, "With a new one", 5, 0)
        wave_when_paused(pair.url, after=before)
    assert {info["topology"] for info in utility(pair.url, "info").values()} == topology


def test_requests_of_many_kinds_run_concurrently(pair: RunningStack) -> None:
    answers_are_the_same_in_a_crowd(pair)


def test_overlapping_lockstep_engines_answer_many_requests_and_wake_up_together() -> None:
    with RunningStack(*PAIR, "--async-scheduling") as pair:
        answers_are_the_same_in_a_crowd(pair)
        before = wave_when_paused(pair.url)
        complete(pair.url, "To be", 30, 1)
        assert wave_when_paused(pair.url, after=before) - before in (1, 2)


def answers_are_the_same_in_a_crowd(pair: RunningStack) -> None:
    """What one engine answers with all experts of its own, two answer with half of them each."""
    prompts = [f"{name}: what say you of" for name in ("ROMEO", "JULIET", "HENRY", "KING")]
    alone = [complete(pair.url, prompt, 16, i % 2) for i, prompt in enumerate(prompts)] * 3
    prompts *= 3
    gate = threading.Barrier(len(prompts))

    def ask(i: int) -> str:
        gate.wait()
        return complete(pair.url, prompts[i], 16, i % 2)

    with watched(pair, 200), ThreadPoolExecutor(len(prompts)) as clients:
        assert list(clients.map(ask, range(len(prompts)))) == alone
    assert call(f"{pair.url}/admin/engines")["engines"][0]["restarts"] == 0
