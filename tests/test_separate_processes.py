"""A coordinator, engines and API servers started one by one, as containers do, over TCP."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.stack

MODEL = "swell-shakespeare"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        found = []
        for _ in range(count):
            listener = sockets.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            found.append(listener.getsockname()[1])
        return found


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def wait_for(condition: Callable[[], bool], what: str, within: float = 30.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Cluster:
    """Processes that know of each other only the coordinator's address and the key."""

    def __init__(self, directory: Path) -> None:
        # Its other sockets are on the three ports above, which a free one near the end has not.
        self.registration = next(port for port in free_ports(20) if port < 65000)
        self.http, self.coordinator_health, self.engine_health = free_ports(3)
        self._key = directory / "key"
        self._key.write_text("a shared secret of these tests")
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name("swell")), *arguments]
        cluster = ["--coordinator", f"127.0.0.1:{self.registration}"]
        key = ["--cluster-key-file", str(self._key)]
        process = subprocess.Popen([*command, *cluster, *key], stdin=subprocess.DEVNULL)
        self._running.append(process)
        return process

    def metric(self, name: str) -> float:
        _, text = get(f"http://127.0.0.1:{self.http}/metrics")
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(f"swell_{name}{{")
        ]
        return sum(values)

    def stop(self) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.stop()


def test_processes_find_each_other_and_say_how_they_are(cluster: Cluster) -> None:
    api = cluster.start("api-server", "--port", str(cluster.http), "--api-server-count", "2")
    ready = f"http://127.0.0.1:{cluster.http}/ready"
    coordinator = cluster.start("coordinator", "--health-port", str(cluster.coordinator_health))
    health = f"http://127.0.0.1:{cluster.coordinator_health}"
    wait_for(lambda: get(f"{health}/ready") == (200, "ready\n"), "the coordinator is ready")
    wait_for(lambda: get(ready)[0] == 503, "the API answers without an engine")

    engine = cluster.start(
        "engine", "--executor", "simulated", "--health-port", str(cluster.engine_health)
    )
    wait_for(lambda: get(ready)[0] == 200, "an engine is found")
    health = f"http://127.0.0.1:{cluster.engine_health}"
    wait_for(lambda: get(f"{health}/ready") == (200, "ready\n"), "both front ends route to it")
    assert get(f"{health}/health") == (200, "ready\n")
    wait_for(lambda: cluster.metric("front_ends") == 2, "both front ends are there")

    body = json.dumps({"model": MODEL, "prompt": "Act", "max_tokens": 4, "ignore_eos": True})
    for _ in range(4):
        request = urllib.request.Request(
            f"http://127.0.0.1:{cluster.http}/v1/completions",
            body.encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 4
    assert cluster.metric("generation_tokens_total") == 16, "one scrape covers both front ends"

    # A front end is replaced, and its successor is known under a number of its own at once.
    victim = psutil.Process(api.pid).children()[0]
    victim.kill()
    wait_for(
        lambda: (
            victim.pid not in {child.pid for child in psutil.Process(api.pid).children()}
            and cluster.metric("front_ends") == 2
        ),
        "the dead front end is replaced",
    )
    for process, code in ((api, 0), (engine, 0), (coordinator, 0)):
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == code


def test_an_api_server_without_a_key_says_what_is_missing(cluster: Cluster) -> None:
    command = [str(Path(sys.executable).with_name("swell")), "api-server", "--port", "0"]
    address = ["--coordinator", f"127.0.0.1:{cluster.registration}"]
    done = subprocess.run([*command, *address], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "--cluster-key-file" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
