"""A whole stack whose one engine computes with two processes."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.running_stack import RunningStack

pytestmark = pytest.mark.stack

SWELL = str(Path(sys.executable).with_name("swell"))

FLAGS = (
    "--data-parallel-size",
    "1",
    "--tensor-parallel-size",
    "2",
    "--api-server-count",
    "1",
    "--dtype",
    "float32",
)

TOKENS = 120
"""More than are computed before the worker is killed."""


def generate(stack: RunningStack, tokens: int) -> str:
    body = {"model": "swell-shakespeare", "prompt": "Once", "max_tokens": tokens}
    request = urllib.request.Request(
        f"{stack.url}/v1/completions",
        json.dumps({**body, "temperature": 0, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.loads(answer.read())["choices"][0]["text"]
        return text


def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_ready(stack: RunningStack) -> bool:
    try:
        with urllib.request.urlopen(f"{stack.url}/ready", timeout=10):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


def steps_run(stack: RunningStack) -> bool:
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return any(re.match(r'swell_num_requests_running{engine="0".* 1.0', line) for line in lines)


def test_requests_outlive_a_killed_worker_and_nothing_outlives_the_stack() -> None:
    with RunningStack(*FLAGS) as stack:
        processes = stack.processes()
        engine, worker = processes["engine 0"], processes["engine 0 worker 1"]
        undisturbed = generate(stack, TOKENS)
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(generate, stack, TOKENS)
            until(lambda: steps_run(stack))
            worker.kill()
            assert answer.result(60) == undisturbed
        until(lambda: not engine.is_running())
        assert stack.processes()["engine 0 worker 1"].pid != worker.pid
        assert "worker 1 has died" in "\n".join(stack.lines)

        # An idle engine notices as well, before the next request has to.
        engine, worker = (stack.processes()[name] for name in ("engine 0", "engine 0 worker 1"))
        worker.kill()
        until(lambda: not engine.is_running())
        until(lambda: is_ready(stack))
        assert undisturbed.startswith(generate(stack, 20))

        # However the engine ends, its worker does too.
        engine, worker = (stack.processes()[name] for name in ("engine 0", "engine 0 worker 1"))
        engine.kill()
        _, alive = psutil.wait_procs([worker], timeout=10)
        assert not alive
        until(lambda: "engine 0 worker 1" in stack.processes())
        stack.stop(timeout=20)


def test_a_stack_stopped_while_its_workers_start_leaves_none() -> None:
    process = subprocess.Popen([SWELL, "serve", "--port", "0", *FLAGS], stdout=subprocess.DEVNULL)
    supervisor = psutil.Process(process.pid)
    workers: list[psutil.Process] = []

    def worker_starts() -> bool:
        workers[:] = [
            each
            for each in supervisor.children(recursive=True)
            if "engine.executor.worker_main" in each.cmdline()
        ]
        return bool(workers)

    until(worker_starts)
    process.terminate()
    process.wait(20)
    assert not any(each.is_running() for each in workers)  # and none was left to init
