"""Whole stacks whose engines compute with two processes each."""

import contextlib
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import psutil
import pytest

from benchmarks.running_stack import RunningStack
from tests.support.commands import SWELL
from tests.support.http import are_replaced, complete, incarnations
from tests.support.metrics import metric, num_running
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

FLAGS = (
    "--data-parallel-size",
    "1",
    "--tensor-parallel-size",
    "2",
    "--api-server-count",
    "1",
    "--dtype",
    "float32",
    "--resume-timeout",
    str(PATIENCE),
)

TOKENS = 60
"""More than are computed before the worker is killed."""
FEWER_TOKENS = 30
"""As many where each takes a step of four processes."""


def test_requests_survive_a_killed_worker_and_nothing_outlives_the_stack() -> None:
    with RunningStack(*FLAGS) as stack:
        processes = stack.processes()
        engine, worker = processes["engine 0"], processes["engine 0 worker 1"]
        undisturbed = complete(stack.url, "Once", TOKENS)
        before = incarnations(stack.url, [0])
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(complete, stack.url, "Once", TOKENS)
            until(lambda: num_running(stack.url) == 1 or answer.done(), "it runs")
            worker.kill()
            assert answer.result(2 * PATIENCE) == undisturbed
        until(lambda: not engine.is_running(), "the engine ends")
        until(partial(are_there, stack, {"engine 0", "engine 0 worker 1"}), "others start")
        assert stack.processes()["engine 0 worker 1"].pid != worker.pid
        until(lambda: "worker 1 has died" in "\n".join(stack.lines), "the log says so")
        until(partial(are_replaced, stack.url, before, [0]), "it is replaced")

        # An idle engine notices as well, before the next request has to.
        before = incarnations(stack.url, [0])
        engine, worker = (stack.processes()[name] for name in ("engine 0", "engine 0 worker 1"))
        worker.kill()
        until(lambda: not engine.is_running(), "the engine ends")
        until(partial(are_there, stack, {"engine 0", "engine 0 worker 1"}), "others start")
        until(partial(are_replaced, stack.url, before, [0]), "it is replaced")
        assert undisturbed.startswith(complete(stack.url, "Once", 20))

        # However the engine ends, its worker does too.
        engine, worker = (stack.processes()[name] for name in ("engine 0", "engine 0 worker 1"))
        engine.kill()
        _, alive = psutil.wait_procs([worker], timeout=PATIENCE)
        assert not alive
        until(lambda: "engine 0 worker 1" in stack.processes(), "another worker starts")
        stack.stop()


def run_there(url: str, answers: "list[Future[str]]") -> bool:
    """Whether engine 0 runs requests, or it is too late to see it."""
    num_running = metric(url, "num_requests_running").get("0", 0.0)
    return num_running > 0 or all(answer.done() for answer in answers)


def are_there(stack: RunningStack, names: set[str]) -> bool:
    return names <= stack.processes().keys()


def test_streams_survive_death_of_a_shard_with_shared_experts() -> None:
    flags = ("--data-parallel-size", "2", *FLAGS[2:], "--enable-expert-parallel")
    with RunningStack(*flags) as stack:
        undisturbed = complete(stack.url, "Once", FEWER_TOKENS)
        processes, before = stack.processes(), incarnations(stack.url, range(2))
        with ThreadPoolExecutor(4) as clients:
            answers = [clients.submit(complete, stack.url, "Once", FEWER_TOKENS) for _ in range(4)]
            until(partial(run_there, stack.url, answers), "engine 0 runs")
            processes["engine 0 worker 1"].kill()
            assert [answer.result(2 * PATIENCE) for answer in answers] == [undisturbed] * 4
        assert not psutil.wait_procs([processes["engine 0"]], timeout=PATIENCE)[1]
        assert processes["engine 1 worker 1"].is_running(), "the other engine goes on"
        until(partial(are_there, stack, set(processes)), "others start")
        until(partial(are_replaced, stack.url, before, [0]), "it is replaced")
        assert [complete(stack.url, "Once", 20, rank) for rank in (0, 1)] == [
            complete(stack.url, "Once", 20)
        ] * 2
        everything = list(stack.processes().values())
        stack.stop()
        assert not any(each.is_running() for each in everything)


@pytest.mark.usefixtures("started_anew")
def test_a_stack_stopped_while_its_workers_start_leaves_none() -> None:
    process = subprocess.Popen([SWELL, "serve", "--port", "0", *FLAGS], stdout=subprocess.DEVNULL)
    supervisor = psutil.Process(process.pid)
    workers: list[psutil.Process] = []

    def worker_starts() -> bool:
        workers.clear()
        for each in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if "engine.executor.worker_main" in each.cmdline():
                    workers.append(each)
        return bool(workers)

    until(worker_starts, "a worker starts")
    process.terminate()
    process.wait(PATIENCE)
    assert not any(each.is_running() for each in workers)  # and none was left to init
