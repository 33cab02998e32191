"""Engines added, taken away and replaced under load: nobody notices."""

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack

pytestmark = pytest.mark.stack

MODEL = "swell-shakespeare"
ADMIN_KEY = "admin-secret"
FLAGS = ("--executor", "simulated", "--simulated-step-us", "3000", "--admin-key", ADMIN_KEY)


def call(url: str, body: object = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
        result: dict[str, object] = json.loads(answer.read())
        return result


class Load:
    """Clients that send requests one after the other and keep what they were told."""

    def __init__(self, url: str, clients: int) -> None:
        self.answers: dict[int, set[str]] = {}
        self.errors: list[str] = []
        self.count = 0
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]

    def _run(self, seed: int) -> None:
        body = {"model": MODEL, "prompt": f"Act {seed}", "max_tokens": 60, "seed": seed}
        while not self._over.is_set():
            try:
                answer = call(f"{self._url}/v1/completions", {**body, "ignore_eos": True})
            except OSError as error:
                self.errors.append(repr(error))
                continue
            self.answers.setdefault(seed, set()).add(json.dumps(answer["choices"]))
            self.count += 1

    @contextmanager
    def running(self) -> Iterator["Load"]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(30)

    def check(self) -> None:
        assert not self.errors, self.errors[:3]
        assert self.count > 50
        assert all(len(told) == 1 for told in self.answers.values()), "the same in every run"


def ready_ranks(url: str) -> set[int]:
    engines = call(f"{url}/admin/engines")["engines"]
    assert isinstance(engines, list)
    return {engine["rank"] for engine in engines if engine["ready"]}


def settle(url: str, size: int) -> dict[str, object]:
    """Wait until the supervisor and the coordinator agree on ranks 0 to size - 1."""
    deadline = time.monotonic() + 60
    while True:
        status = call(f"{url}/admin/scale")
        if not status["busy"] and ready_ranks(url) == set(range(size)):
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.05)


def test_scaling_up_and_down_under_load_fails_no_request() -> None:
    with RunningStack(*FLAGS) as stack, Load(stack.url, 16).running() as load:
        for size in (4, 1, 3):
            answer = call(f"{stack.url}/admin/scale", {"data_parallel_size": size})
            assert (answer["data_parallel_size"], answer["busy"]) == (size, True)
            status = settle(stack.url, size)
            assert status["error"] is None
            before = load.count
            deadline = time.monotonic() + 15
            while load.count < before + 30:
                assert time.monotonic() < deadline, "the load goes on"
                time.sleep(0.02)
    load.check()


@pytest.mark.parametrize("size", [1, 2])
def test_replacing_every_engine_under_load_fails_no_request(size: int) -> None:
    flags = (*FLAGS, "--data-parallel-size", str(size))
    with RunningStack(*flags) as stack, Load(stack.url, 8).running() as load:
        engines = call(f"{stack.url}/admin/engines")["engines"]
        assert isinstance(engines, list)
        old = {engine["incarnation"] for engine in engines}
        call(f"{stack.url}/admin/restart", {})
        settle(stack.url, size)
        engines = call(f"{stack.url}/admin/engines")["engines"]
        assert isinstance(engines, list)
        assert not old & {engine["incarnation"] for engine in engines}
        before = load.count
        deadline = time.monotonic() + 15
        while load.count < before + 30:
            assert time.monotonic() < deadline, "the load goes on"
            time.sleep(0.02)
    load.check()


@pytest.mark.parametrize("size", [0, -1, 5000, "two"])
def test_an_impossible_size_is_refused_by_name(stack_with_admin: str, size: object) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        call(f"{stack_with_admin}/admin/scale", {"data_parallel_size": size})
    error = json.loads(caught.value.read())["error"]
    caught.value.close()
    assert (caught.value.code, error["param"]) == (400, "data_parallel_size")


def swell_scale(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("swell")), "scale", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_scales_and_says_so(stack_with_admin: str) -> None:
    flags = ("--url", stack_with_admin, "--admin-key", ADMIN_KEY)
    done = swell_scale("3", *flags)
    assert (done.returncode, done.stdout) == (
        0, "3 engines: engine 0 ready, engine 1 ready, engine 2 ready\n"
    )  # fmt: skip
    assert swell_scale(*flags).stdout == done.stdout
    wrong_key = swell_scale("2", "--url", stack_with_admin, "--admin-key", "wrong")
    assert wrong_key.returncode == 1
    assert "key" in wrong_key.stderr
    nobody = swell_scale("2", "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 1
    assert "cannot be reached" in nobody.stderr


@pytest.fixture(scope="module")
def stack_with_admin() -> Iterator[str]:
    with RunningStack(*FLAGS) as stack:
        yield stack.url
