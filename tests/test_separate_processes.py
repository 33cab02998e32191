"""A coordinator, engines and API servers started one by one, as containers do, over TCP."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from tests.support.commands import SWELL, end_processes, run_swell
from tests.support.http import complete, fetch
from tests.support.metrics import total
from tests.support.ports import free_ports, port_of_a_coordinator
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack


class Cluster:
    """Processes that know of each other only the coordinator's address and the key."""

    def __init__(self, directory: Path) -> None:
        self.registration = port_of_a_coordinator()
        self.http, self.coordinator_health, self.engine_health, self.other_http = free_ports(4)
        self._key = directory / "key"
        self._key.write_text("a shared secret of these tests")
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, stderr: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        command = [SWELL, *arguments]
        cluster = ["--coordinator", f"127.0.0.1:{self.registration}"]
        key = ["--cluster-key-file", str(self._key)]
        times = ["--heartbeat-interval", "0.2"]
        process = subprocess.Popen(
            [*command, *cluster, *key, *times], stdin=subprocess.DEVNULL, stderr=stderr
        )
        self._running.append(process)
        return process

    def total(self, name: str) -> float:
        return total(f"http://127.0.0.1:{self.http}", name)

    def stop(self) -> None:
        end_processes(self._running)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.stop()


def test_api_servers_that_share_no_memory_share_the_limit_of_a_key(cluster: Cluster) -> None:
    limit = ("--max-sequences-per-key", "2")
    cluster.start("coordinator", "--health-port", str(cluster.coordinator_health))
    slow = ("--executor", "simulated", "--simulated-step-us", "20000")
    cluster.start("engine", *slow, "--health-port", str(cluster.engine_health))
    urls = [f"http://127.0.0.1:{port}" for port in (cluster.http, cluster.other_http)]
    for url in urls:
        cluster.start("api-server", "--port", url.rpartition(":")[2], *limit)
    for url in urls:
        until(lambda: fetch(f"{url}/ready").status == 200, f"{url} is ready")  # noqa: B023

    body = {"prompt": "Act", "max_tokens": 400, "n": 2, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{urls[0]}/v1/completions", json=body, timeout=PATIENCE) as held:
        lines = held.iter_lines()  # its end would close the connection
        next(lines)
        short = {"prompt": "Act", "max_tokens": 1}

        def asked() -> httpx.Response:
            return httpx.post(f"{urls[1]}/v1/completions", json=short, timeout=PATIENCE)

        until(lambda: asked().status_code == 429, "the other node counts them")
        assert "max_sequences_per_key is 2" in asked().text
    until(lambda: asked().status_code == 200, "the key is below its limit")


@pytest.mark.usefixtures("started_anew")
def test_processes_find_each_other_and_report_health(cluster: Cluster) -> None:
    api = cluster.start("api-server", "--port", str(cluster.http), "--api-server-count", "2")
    ready = f"http://127.0.0.1:{cluster.http}/ready"
    coordinator = cluster.start("coordinator", "--health-port", str(cluster.coordinator_health))
    health = f"http://127.0.0.1:{cluster.coordinator_health}"
    until(lambda: fetch(f"{health}/ready")[:2] == (200, "ready\n"), "the coordinator is ready")
    until(lambda: fetch(ready).status == 503, "the API answers without an engine")

    engine = cluster.start(
        "engine", "--executor", "simulated", "--health-port", str(cluster.engine_health)
    )
    until(lambda: fetch(ready).status == 200, "an engine is found")
    health = f"http://127.0.0.1:{cluster.engine_health}"
    until(lambda: fetch(f"{health}/ready")[:2] == (200, "ready\n"), "both front ends route to it")
    assert fetch(f"{health}/health")[:2] == (200, "ready\n")
    until(lambda: cluster.total("front_ends") == 2, "both front ends are there")

    for _ in range(4):
        complete(f"http://127.0.0.1:{cluster.http}", "Act", 4)
    until(
        lambda: cluster.total("generation_tokens_total") == 16, "one scrape covers both front ends"
    )

    # A front end is replaced, and its successor is known under a number of its own at once.
    def front_ends() -> dict[str, psutil.Process]:
        found = {}
        for each in psutil.Process(api.pid).children():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                found[" ".join(each.cmdline()).strip()] = each
        return {name: each for name, each in found.items() if name.startswith("swell: api")}

    victim = front_ends()["swell: api 0"]
    victim.kill()
    until(
        lambda: (
            victim.pid not in {each.pid for each in front_ends().values()}
            and len(front_ends()) == 2
            and cluster.total("front_ends") == 2
        ),
        "the dead front end is replaced",
    )
    for process, code in ((api, 0), (engine, 0), (coordinator, 0)):
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == code


def test_suspended_front_end_exits_if_its_number_was_reassigned(
    cluster: Cluster, tmp_path: Path
) -> None:
    """It would be known to no engine, and wait for its number for ever."""
    log = tmp_path / "log"
    with log.open("wb") as written:
        cluster.start("coordinator", stderr=written)
    cluster.start("engine", "--executor", "simulated")
    one = ("api-server", "--api-server-count", "1", "--port")
    sleeper = cluster.start(*one, str(cluster.other_http))
    until(lambda: fetch(f"http://127.0.0.1:{cluster.other_http}/ready").status == 200, "it serves")
    sleeper.send_signal(signal.SIGSTOP)
    try:
        until(lambda: re.search(r"front end \d+ has been silent", log.read_text()), "it is missed")
        cluster.start(*one, str(cluster.http))
        until(lambda: fetch(f"http://127.0.0.1:{cluster.http}/ready").status == 200, "one follows")
    finally:
        sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait(PATIENCE) != 0
    until(lambda: cluster.total("front_ends") == 1, "one front end is left")


def test_api_server_without_key_names_missing_setting(cluster: Cluster) -> None:
    address = f"127.0.0.1:{cluster.registration}"
    done = run_swell("api-server", "--port", "0", "--coordinator", address)
    assert done.returncode == 1
    assert "--cluster-key-file" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
