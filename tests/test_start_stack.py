"""How the processes of a stack start: forked from templates, or each by itself."""

import contextlib
import resource
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.running_stack import RunningStack
from server.fleet.child import has_pidfds
from tests.support.commands import run_swell
from tests.support.http import call, completion, fetch
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(
        not has_pidfds(), reason="this system cannot give a fork to its grandparent"
    ),
]

ANEW = pytest.mark.usefixtures("started_anew")
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
    """Return how many the supervisor has, once their number does not change any more."""
    counts = deque[int](maxlen=20)

    def is_steady() -> bool:
        counts.append(stack.processes()["supervisor"].num_fds())
        return len(counts) == 20 and len(set(counts)) == 1

    until(is_steady, "the supervisor's descriptors are open")
    return counts[0]


@pytest.fixture
def few_files() -> Iterator[int]:
    """May open few files, as what is started by this process; how many it might have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@ANEW
def test_forked_processes_work_with_less_memory_and_are_replaced(few_files: int) -> None:
    with started("exec") as stack:
        text = answer(stack)
        each_by_itself, held = memory(stack), descriptors(stack)
        for name, process in stack.processes().items():
            assert process.rlimit(psutil.RLIMIT_NOFILE) == (few_files, few_files), name
    with started("fork") as stack:
        until(lambda: set(stack.processes()) == NAMES, "the templates have ended")
        assert answer(stack) == text
        assert memory(stack) < each_by_itself
        until(lambda: descriptors(stack) <= held, "what the start needed is closed")
        supervisor = stack.processes()["supervisor"]
        until(lambda: len(supervisor.children(recursive=True)) == 5, "what has ended is reaped")
        assert {each.ppid() for each in supervisor.children()} == {supervisor.pid}
        assert psutil.STATUS_ZOMBIE not in {each.status() for each in supervisor.children()}

        # Those that are killed are started again.
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
            assert answer(stack) == text
    assert stack.process.returncode == 0


@ANEW
def test_a_stop_while_templates_load_leaves_nothing() -> None:
    command = [sys.executable, "-m", "server.local_server_main", "serve", "--port", "0"]
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
    assert not psutil.wait_procs(children, timeout=PATIENCE)[1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--max-model-len", "99999"), "--max-model-len 99999 is more than the 1024 positions"),
        (("--chat-template", "/nowhere.jinja"), "--chat-template cannot be read"),
        (("--api-key-file", "/nowhere"), "--api-key-file /nowhere cannot be read"),
    ],
)
def test_reason_of_failure_is_the_last_line(flags: tuple[str, ...], reason: str) -> None:
    served = run_swell("serve", "--port", str(free_port()), "--data-parallel-size", "1", *flags)
    assert served.returncode == 1
    last = served.stderr.strip().splitlines()[-1]
    assert last.startswith("swell cannot start: ")
    assert reason in last
