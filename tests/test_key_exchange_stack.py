"""Cluster key and API keys are exchanged under load, without a moment in which nobody gets in."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.commands import swell
from tests.support.http import Answer, completion, fetch
from tests.support.load import assert_none
from tests.support.ports import free_port, port_of_a_coordinator
from tests.support.process_logs import printed
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

OLD, NEW = "the old secret of all", "the new secret of all"
API_KEYS, CLUSTER_KEYS = "] keys were read again", "] cluster keys were read again"
"""What a front end says of its files of keys."""


class Secret:
    """A directory as the kubelet shows a secret: a link is pointed elsewhere for each version."""

    def __init__(self, directory: Path, **keys: str) -> None:
        self._base = directory
        self._version = 0
        self.show(**keys)

    def show(self, **keys: str) -> None:
        self._version += 1
        made = self._base / f"version-{self._version}"
        made.mkdir()
        for name, text in keys.items():
            (made / name).write_text(text)
        (self._base / "next").symlink_to(made.name)
        os.replace(self._base / "next", self._base / "data")

    def path(self, name: str) -> str:
        return str(self._base / "data" / name)


class Clients:
    """Clients that ask all the while, with the key that holds."""

    def __init__(self, url: str, key: str) -> None:
        self.key = key
        self._url = url
        self.answered = 0
        self._right: dict[int, str] = {}
        self._failures: list[Answer] = []
        self._over = threading.Event()

    def _run(self, number: int) -> None:
        body = completion(f"Act {number}", 20, seed=number)
        while not self._over.is_set():
            answer = fetch(f"{self._url}/v1/completions", body, key=self.key)
            told = json.loads(answer.text)["choices"][0]["text"] if answer.status == 200 else None
            # Which engine answers, and what key opened the way, changes no token.
            if told is not None and told == self._right.setdefault(number, told):
                self.answered += 1
            else:
                self._failures.append(answer)
                self._over.wait(0.05)

    @contextmanager
    def asking(self, number: int) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(each,)) for each in range(number)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(PATIENCE)

    def go_on(self) -> None:
        """Wait until they are answered, as they always were."""
        before = self.answered
        until(lambda: self._failures or self.answered > before + 10, "clients are answered")
        self.check()

    def check(self) -> None:
        assert_none(self._failures)


def test_keys_are_exchanged_under_load_without_a_failed_request(tmp_path: Path) -> None:
    secret = Secret(tmp_path, cluster=OLD, api="first\n")
    address = f"127.0.0.1:{port_of_a_coordinator()}"
    join = (
        "--coordinator", address, "--cluster-key-file", secret.path("cluster"),
        "--accepted-cluster-key-file", secret.path("accepted"), "--heartbeat-interval", "0.2",
    )  # fmt: skip

    def engine(stack: ExitStack) -> ExitStack:
        """Start an engine; all front ends that there are route to it."""
        port = free_port()
        flags = (
            "--executor", "simulated", "--simulated-step-us", "10000", "--health-port", str(port),
        )  # fmt: skip
        own = stack.enter_context(ExitStack())
        own.enter_context(swell("engine", *join, *flags))
        ready = f"http://127.0.0.1:{port}/ready"
        until(lambda: fetch(ready).status == 200, "an engine joins, and front ends route to it")
        return own

    with ExitStack() as running:
        coordinator = running.enter_context(ExitStack())
        coordinator.enter_context(swell("coordinator", *join))
        first = engine(running)
        front = RunningStack(
            *join, "--api-server-count", "2", "--api-key-file", secret.path("api"),
            command="api-server",
        )  # fmt: skip
        url = running.enter_context(front).url
        clients = Clients(url, "first")

        def say(what: str, times: int) -> bool:
            """Whether both front ends have said something so often; each request comes to one."""
            fetch(f"{url}/v1/models", key=clients.key)
            return sum("[api" in each and what in each for each in front.lines) >= 2 * times

        with clients.asking(4):
            clients.go_on()
            # Both are accepted where anybody listens; who is there connects with the old one.
            secret.show(cluster=OLD, accepted=NEW, api="first\nsecond\n")
            known = until(lambda: say(CLUSTER_KEYS, 1) and say(API_KEYS, 1), "both are known")
            clients.key = "second"
            clients.go_on()
            secret.show(cluster=NEW, accepted=OLD, api="second\n")
            gone = until(lambda: say(CLUSTER_KEYS, 2) and say(API_KEYS, 2), "the old one goes")
            assert fetch(f"{url}/v1/models", key="first").status == 401
            second = engine(running)  # with the new key beside the old
            coordinator.close()
            began = time.monotonic()
            follower = coordinator.enter_context(swell("coordinator", *join))
            until(lambda: say("registered again", 1), "front ends are back")
            until(
                lambda: all(f"engine {each} is ready" in printed(follower) for each in (0, 1)),
                "both engines are back with the new coordinator",
            )
            back = time.monotonic() - began
            clients.go_on()
            first.close()
            clients.go_on()
            secret.show(cluster=NEW, api="second\n")
            engine(running)  # nobody needs the old key any more
            clients.go_on()
            second.close()
            clients.go_on()
    clients.check()
    print(
        f"{clients.answered} answers, none failed or wrong; new keys were known after "
        f"{known:.1f} s, old ones gone after {gone:.1f} s, everybody with the "
        f"new coordinator after {back:.1f} s"
    )
