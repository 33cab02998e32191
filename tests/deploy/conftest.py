"""One running compose project for all tests of containers."""

import os
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deploy.docker_engine import (
    BASE_IMAGE,
    PROMETHEUS_IMAGE,
    Docker,
    NoDocker,
    clean_checkout,
    fill_wheelhouse,
    find_or_start,
    make_base_image,
    make_prometheus_image,
)

PROJECT = "swelltest"
API_KEY = "secret-of-clients"
METRICS_KEY = "secret-of-prometheus"
SERVICES = ("coordinator", "engine", "api", "prometheus")


def wait_until(condition: Callable[[], bool], what: str, within: float) -> float:
    """Wait for a condition and return how many seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within, f"not within {within} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - began


def fetch(url: str, timeout: float = 10.0, key: str | None = None) -> tuple[int, str]:
    """Return (status, body) of a GET; status 0 when nobody answers."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class Compose:
    """A compose project made from a clean checkout."""

    def __init__(self, docker: Docker, checkout: Path, command: tuple[str, ...]) -> None:
        self.docker = docker
        self.checkout = checkout
        self.file = checkout / "docker" / "compose.yaml"
        with ExitStack() as held:
            listeners = [held.enter_context(socket.socket()) for _ in range(2)]
            for listener in listeners:
                listener.bind(("127.0.0.1", 0))
            api, prometheus = (listener.getsockname()[1] for listener in listeners)
        self.url = f"http://127.0.0.1:{api}"
        self.prometheus = f"http://127.0.0.1:{prometheus}"
        self.timings: dict[str, float] = {}
        self._command = command
        self._variables = {
            "PORT": str(api),
            "PROMETHEUS_PORT": str(prometheus),
            "BASE_IMAGE": BASE_IMAGE,
            "PROMETHEUS_IMAGE": PROMETHEUS_IMAGE,
            "TORCH_INDEX_URL": "",
            "PIP_NO_INDEX": "1",
            "IMAGE_PREFIX": PROJECT,
            "TAG": "test",
            "KV_CACHE_MEMORY_BYTES": str(256 * 2**20),
            "API_KEY": API_KEY,
            "ADMIN_KEY": "admin-secret",
            "METRICS_KEY": METRICS_KEY,
        }

    def __call__(self, *arguments: str, timeout: float = 120.0) -> str:
        """Run a compose command that has to succeed and return what it printed."""
        return self.docker.output(
            *self._command, "-p", PROJECT, "-f", str(self.file), *arguments,
            timeout=timeout, **self._variables,
        )  # fmt: skip

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers, oldest first."""
        label = "label=com.docker.compose"
        listed = self.docker.output(
            "docker", "ps", "-q", "--filter", f"{label}.project={PROJECT}",
            "--filter", f"{label}.service={service}",
        )  # fmt: skip
        return listed.split()[::-1]

    def metrics(self) -> str:
        """Return what Prometheus reads, with its key."""
        return fetch(f"{self.url}/metrics", key=METRICS_KEY)[1]

    def metric_engines(self, metric: str) -> set[str]:
        """Return the engines for which /metrics has a series of a name, with a value over 0."""
        lines = self.metrics().splitlines()
        return {
            line.split('engine="')[1].split('"')[0]
            for line in lines
            if line.startswith(f"{metric}{{") and float(line.rsplit(" ", 1)[1]) > 0
        }


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    """A Docker engine with the base images; skips, saying why, where there can be none."""
    with tempfile.TemporaryDirectory(prefix="swell-docker-") as directory:
        try:
            engine = find_or_start(Path(directory))
        except NoDocker as reason:
            pytest.skip(f"no Docker engine: {reason}")
        try:
            make_base_image(engine, Path(directory))
            tried = engine.run("docker", "run", "--rm", BASE_IMAGE, "true")
            if tried.returncode != 0:
                pytest.skip(f"containers do not run here: {tried.stdout.strip()[-500:]}")
            make_prometheus_image(engine)
            yield engine
        finally:
            engine.close()


@pytest.fixture(scope="module")
def checkout() -> Iterator[Path]:
    """A clean copy of the project, with a cluster key, as people have who follow the docs."""
    with tempfile.TemporaryDirectory(prefix="swell-checkout-") as directory:
        clean_checkout(Path(directory))
        Path(directory).chmod(0o755)
        (Path(directory) / "docker" / "cluster.key").write_bytes(os.urandom(32).hex().encode())
        yield Path(directory)


@pytest.fixture(scope="module")
def compose(docker: Docker, checkout: Path) -> Iterator[Compose]:
    """The running project: a coordinator, two engines, the API and Prometheus."""
    fill_wheelhouse(checkout)
    project = Compose(docker, checkout, ("docker-compose",))
    began = time.monotonic()
    project("build", "coordinator", "engine", "api", timeout=900)
    project.timings["build"] = time.monotonic() - began
    began = time.monotonic()
    try:
        project("up", "-d", *SERVICES, timeout=200)
        project.timings["up"] = time.monotonic() - began
        wait_until(lambda: fetch(f"{project.url}/ready")[0] == 200, "ready", within=120)
        project.timings["ready"] = time.monotonic() - began
        wait_until(
            lambda: len(project.metric_engines("swell_engine_up")) == 2, "two engines", within=120
        )
        project.timings["both engines"] = time.monotonic() - began
        yield project
    except BaseException:
        print(docker.run("docker-compose", "-p", PROJECT, "-f", str(project.file), "logs",
                         "--tail", "40").stdout)  # fmt: skip
        raise
    finally:
        project("down", "-v", "--remove-orphans", timeout=200)
        images = [f"{PROJECT}-{kind}:test" for kind in ("coordinator", "server", "engine")]
        docker.run("docker", "image", "rm", "-f", *images)
