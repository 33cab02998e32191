"""A whole stack whose engine's processes are each bound to a CPU of their own."""

import os
from pathlib import Path

import psutil
import pytest

from benchmarks.running_stack import RunningStack
from engine.shared.cpu.lists import list_text
from tests.support.commands import run_swell
from tests.support.http import complete

pytestmark = pytest.mark.stack

USABLE = tuple(sorted(os.sched_getaffinity(0)))

SMALL = ("--data-parallel-size", "1", "--tensor-parallel-size", "2", "--api-server-count", "1")


def allowed(process: psutil.Process) -> set[str]:
    """Return what CPUs the threads of a process may use, as the kernel says it."""
    found = set()
    for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:  # a thread that has ended meanwhile
            continue
        found |= {line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:")}
    return found


@pytest.mark.skipif(len(USABLE) < 2, reason="needs two CPUs")
def test_all_threads_of_engine_processes_stay_on_their_cpus() -> None:
    first, second = USABLE[:2]
    with RunningStack(*SMALL, "--cpu-bind", f"{first}|{second}") as stack:
        assert complete(stack.url, "Once", 8)
        processes = stack.processes()
        assert allowed(processes["engine 0"]) == {str(first)}
        assert allowed(processes["engine 0 worker 1"]) == {str(second)}
        others = USABLE[2:] if len(USABLE) >= 4 else USABLE
        assert allowed(processes["coordinator"]) == {list_text(others)}
        assert allowed(processes["api 0"]) == {list_text(others)}
        assert f"on CPUs {first}|{second}" in "\n".join(stack.lines)
        stack.stop()


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_unavailable_cpus_are_refused(command: str) -> None:
    absent = str(USABLE[-1] + 1)
    refused = run_swell(command, "--cpu-bind", absent, "--data-parallel-size", "1")
    assert refused.returncode
    said = " ".join((refused.stdout + refused.stderr).split())
    assert f"--cpu-bind {absent}: CPU {absent} is not among those" in said
    assert list_text(USABLE) in said
