"""An engine exits if a step hangs, but not if it is only busy."""

import subprocess
import sys

import pytest

from engine.core.watchdog import FIRST_STEPS, FIRST_STEPS_FACTOR, HUNG_EXIT_CODE, TOKENS, StepWatch
from tests.support.waiting import PATIENCE


def warmed_up(step_timeout: float) -> StepWatch:
    watch = StepWatch(step_timeout)
    for _ in range(FIRST_STEPS):
        watch.begin(1, 0.0)
        watch.end()
    return watch


def test_engine_waiting_between_steps_is_never_hung() -> None:
    watch = warmed_up(10.0)
    assert watch.hung_for(1e9) is None
    watch.begin(5, now=100.0)
    watch.end()
    assert watch.hung_for(1e9) is None


@pytest.mark.parametrize(
    ("tokens", "timeout"), [(0, 10.0), (1, 10.0), (TOKENS, 10.0), (3 * TOKENS, 30.0)]
)
def test_step_timeout_is_proportional_to_prefill_tokens(tokens: int, timeout: float) -> None:
    watch = warmed_up(10.0)
    watch.begin(tokens, now=0.0)
    assert watch.hung_for(timeout) is None
    assert watch.hung_for(timeout + 0.1) == timeout + 0.1


def test_an_overlapped_step_also_waits_for_the_one_before() -> None:
    watch = warmed_up(10.0)
    watch.begin(3 * TOKENS, now=0.0)
    watch.end()
    watch.begin(TOKENS, now=1.0)
    assert watch.hung_for(40.9) is None
    assert watch.hung_for(41.1) is not None


def test_first_steps_have_longer_timeout() -> None:
    watch = StepWatch(10.0)
    watch.begin(1, now=0.0)
    assert watch.hung_for(10.0 * FIRST_STEPS_FACTOR) is None
    assert watch.hung_for(10.0 * FIRST_STEPS_FACTOR + 1) is not None


PROGRAM = """
import re, sys, time
import engine.core.watchdog
from engine.core.watchdog import StepWatch, Watchdog

engine.core.watchdog._MIN_STUCK_SECONDS = 0.5
watch = StepWatch({step_timeout})
watchdog = Watchdog(watch, 0.1, lambda reason: print("last words:", reason, flush=True))
watchdog.start()
watch.begin(1, time.monotonic())

def hangs_politely():
    while True:
        time.sleep(0.01)

def hangs_with_the_lock():
    re.fullmatch("(a|a)*b", "a" * 60)

def is_done():
    watch.end()
    watchdog.stop()

{what}()
"""


def run(what: str, step_timeout: float = 0.1) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(what=what, step_timeout=step_timeout)],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def test_a_hung_process_logs_its_stacks_notifies_its_peers_and_exits() -> None:
    ended = run("hangs_politely")
    assert ended.returncode == HUNG_EXIT_CODE
    assert "hangs_politely" in ended.stderr
    assert "last words: a step has not ended" in ended.stdout


def test_code_that_never_releases_the_gil_does_not_keep_process_alive() -> None:
    ended = run("hangs_with_the_lock")
    assert ended.returncode != 0
    assert "hangs_with_the_lock" in ended.stderr


def test_finished_process_exits_cleanly() -> None:
    assert run("is_done", step_timeout=PATIENCE).returncode == 0
