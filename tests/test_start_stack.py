"""How the processes of a stack start: forked from templates, or each by itself."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.running_stack import RunningStack
from server.fleet.forking.forked_process import can_fork
from tests.support.http import call, completion, fetch
from tests.support.waiting import PATIENCE, until

pytestmark = [
    pytest.mark.stack,
    pytest.mark.usefixtures("started_anew"),
    pytest.mark.skipif(not can_fork(), reason="this system cannot give a fork to its grandparent"),
]

NAMES = {"supervisor", "coordinator", "engine 0", "engine 1", "api 0", "api 1"}
BODY = completion("Once upon a time", 12, temperature=0.0)


@contextlib.contextmanager
def started(method: str) -> Iterator[RunningStack]:
    flags = ("--start-method", method, "--min-ready-engines", "2", "--log-level", "warning")
    with RunningStack(*flags) as running:
        yield running


def answer(stack: RunningStack) -> str:
    text: str = call(f"{stack.url}/v1/completions", BODY)["choices"][0]["text"]
    return text


def memory(stack: RunningStack) -> int:
    """Return the bytes of memory of all processes; of what they share, each has its part."""
    return sum(each.memory_full_info().pss for each in stack.processes().values())


def descriptors(stack: RunningStack) -> int:
    """Return how many the supervisor has, once it holds the files of the others."""

    def holds_files() -> bool:
        held = stack.processes()["supervisor"].open_files()
        return any(Path(each.path).name == "responses.sqlite" for each in held)

    until(holds_files, "the supervisor holds the files of the others")
    return stack.processes()["supervisor"].num_fds()


def test_forked_processes_are_like_others_and_take_less_memory() -> None:
    with started("exec") as stack:
        text = answer(stack)
        each_by_itself, held = memory(stack), descriptors(stack)
    with started("fork") as stack:
        until(lambda: set(stack.processes()) == NAMES, "the templates have ended")
        assert answer(stack) == text
        assert memory(stack) < each_by_itself
        until(lambda: descriptors(stack) <= held, "what the start needed is closed")
        supervisor = stack.processes()["supervisor"]
        assert {each.ppid() for each in supervisor.children()} == {supervisor.pid}
        assert psutil.STATUS_ZOMBIE not in {each.status() for each in supervisor.children()}


def test_forked_processes_that_are_killed_are_started_again() -> None:
    with started("fork") as stack:
        before = stack.processes()
        for name in ("engine 0", "api 1"):
            before[name].kill()

        def has_all_anew() -> bool:
            now = stack.processes()
            anew = all(name in now and now[name] != before[name] for name in ("engine 0", "api 1"))
            return anew and set(now) == NAMES

        until(has_all_anew, "both are there again")
        for _ in range(2):
            until(lambda: fetch(f"{stack.url}/ready").status == 200, "it serves")
            assert answer(stack)
    assert stack.process.returncode == 0


def test_a_stop_while_templates_load_leaves_nothing() -> None:
    command = [sys.executable, "-m", "server.fleet.own_server_main", "serve", "--port", "0"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        supervisor = psutil.Process(process.pid)

        def templates() -> list[psutil.Process]:
            with contextlib.suppress(psutil.Error):
                found = supervisor.children()
                return [each for each in found if "template of" in " ".join(each.cmdline())]
            return []

        until(lambda: len(templates()) == 2, "both are there")
        children = supervisor.children(recursive=True)
        process.terminate()
        assert process.wait(PATIENCE) == 0
    assert not [each for each in children if each.is_running()]
