"""Helpers for stacks whose engines run in lockstep, and diagnostics when they hang."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.running_stack import RunningStack
from tests.support.http import ADMIN_KEY, call
from tests.support.metrics import metric
from tests.support.waiting import until

FLAGS = (
    "--enable-expert-parallel", "--dtype", "float32", "--admin-key", ADMIN_KEY,
    "--num-kv-blocks", "2048",
)  # fmt: skip


def utility(url: str, name: str, rank: int | None = None) -> dict[int, dict[str, Any]]:
    """Call a utility of one engine or all; return the results by rank."""
    results = _answers(url, name, rank)
    assert all(each["error"] is None for each in results), results
    return {each["rank"]: each["result"] for each in results}


def infos(url: str) -> dict[int, dict[str, Any]]:
    """Return the `info` of all engines that answer; others may just be exiting."""
    results = _answers(url, "info", None)
    return {each["rank"]: each["result"] for each in results if each["error"] is None}


def weight_versions(url: str) -> dict[int, str]:
    """Return the weight version of each engine."""
    return {rank: info["weight_version"] for rank, info in infos(url).items()}


def _answers(url: str, name: str, rank: int | None) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = call(f"{url}/admin/utilities", {"name": name, "rank": rank})[
        "answers"
    ]
    return answers


def is_paused(url: str) -> bool:
    """Return whether the engines are paused, according to the metrics."""
    return metric(url, "engines_running")[""] == 0


def wave_when_paused(url: str, after: int = -1) -> int:
    """Wait until the engines are paused and all report the same wave; return it.

    Args:
        after: a wave that must be over. A front end that does not know it yet would report the
            engines as paused before it ends.
    """
    waves: set[int] = set()

    def all_agree() -> bool:
        waves.clear()
        waves.update(int(info["wave"]) for info in infos(url).values())
        waves.add(int(metric(url, "wave")[""]))
        return is_paused(url) and len(waves) == 1 and min(waves) > after

    until(all_agree, f"all agree on a wave after {after}")
    return waves.pop()


def topologies(url: str) -> set[int]:
    """Return the group numbers that engines report."""
    return {int(info["topology"]) for info in infos(url).values()}


def kill(stack: RunningStack, name: str) -> float:
    """Kill a process; return the time."""
    stack.processes()[name].kill()
    return time.monotonic()


@contextmanager
def watched(stack: RunningStack, seconds: float) -> Iterator[None]:
    """Abort the block after this many seconds, showing the stacks of all processes."""

    def give_up() -> None:
        before = len(stack.lines)
        processes = stack.processes()
        for process in processes.values():
            process.send_signal(signal.SIGUSR1)
        with suppress(AssertionError):  # some may be stopped, or too stuck even for that
            until(
                lambda: str(stack.lines[before:]).count("Current thread") >= len(processes),
                "all processes show their stacks",
                within=2.0,
            )
        stack.kill()
        print("\n".join(stack.lines[-600:]))

    watchdog = threading.Timer(seconds, give_up)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
