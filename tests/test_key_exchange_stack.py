"""Cluster key and API keys are exchanged under load, without a moment in which nobody gets in."""

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.commands import swell
from tests.support.http import fetch
from tests.support.load import Load
from tests.support.ports import free_port, port_of_a_coordinator
from tests.support.process_logs import printed
from tests.support.waiting import until

pytestmark = pytest.mark.stack

OLD, NEW = "the old secret of all", "the new secret of all"
API_KEYS, CLUSTER_KEYS = "] keys were reloaded", "] cluster keys were reloaded"
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


def test_keys_are_rotated_under_load_without_failed_requests(tmp_path: Path) -> None:
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
            "--executor", "simulated", "--simulated-step-us", "6000", "--health-port", str(port),
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

        def say(what: str, times: int, key: str = "second") -> bool:
            """Whether both front ends have said something so often; each request comes to one."""
            fetch(f"{url}/v1/models", key=key)
            return sum("[api" in each and what in each for each in front.lines) >= 2 * times

        def both_say(times: int, key: str = "second") -> bool:
            return say(CLUSTER_KEYS, times, key) and say(API_KEYS, times, key)

        with Load(url, 8, "first").running() as load:
            load.goes_on()
            # Both are accepted where anybody listens; who is there connects with the old one.
            secret.show(cluster=OLD, accepted=NEW, api="first\nsecond\n")
            known = until(lambda: both_say(1, "first"), "both are known")
            load.turn_to(url, "second")
            secret.show(cluster=NEW, accepted=OLD, api="second\n")
            gone = until(lambda: both_say(2), "the old one goes")
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
            load.goes_on()
            first.close()
            load.goes_on()
            secret.show(cluster=NEW, api="second\n")
            engine(running)  # nobody needs the old key any more
            load.goes_on()
            second.close()
            load.goes_on()
    load.check()
    print(
        f"{load.count} answers, none failed or wrong; new keys were known after "
        f"{known:.1f} s, old ones gone after {gone:.1f} s, everybody with the "
        f"new coordinator after {back:.1f} s"
    )
