"""A running compose project shared by all container tests."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer

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
from tests.deploy.groups import ContainersFirst
from tests.support.http import ADMIN_KEY, fetch
from tests.support.metrics import metric, scrape
from tests.support.ports import free_ports
from tests.support.waiting import until

PROJECT = "swelltest"
API_KEY = "secret-of-clients"
METRICS_KEY = "secret-of-prometheus"
SERVICES = ("coordinator", "engine", "api", "prometheus")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ContainersFirst:
    """Distribute container tests over the workers of `pytest -n`."""
    return ContainersFirst(config, log)


class Compose:
    """A compose project built from a clean checkout."""

    def __init__(self, docker: Docker, checkout: Path, command: tuple[str, ...]) -> None:
        self.docker = docker
        self.checkout = checkout
        self.file = checkout / "docker" / "compose.yaml"
        api, prometheus = free_ports(2)
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
            "ADMIN_KEY": ADMIN_KEY,
            "METRICS_KEY": METRICS_KEY,
        }

    def __call__(self, *arguments: str, timeout: float = 120.0) -> str:
        """Run a compose command, which must succeed; return its output."""
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
        """Return the text of /metrics, fetched with Prometheus's key."""
        return scrape(self.url, METRICS_KEY)

    def engines_up(self) -> set[str]:
        """Return the running engines according to /metrics, or none if there is no response."""
        try:
            values = metric(self.url, "engine_up", key=METRICS_KEY)
        except ConnectionError:
            return set()
        return {engine for engine, value in values.items() if value > 0}


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """A Docker engine with the base images; skips the tests with a reason if unavailable."""
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


@pytest.fixture(scope="session")
def checkout() -> Iterator[Path]:
    """A clean copy of the project."""
    with tempfile.TemporaryDirectory(prefix="swell-checkout-") as directory:
        clean_checkout(Path(directory))
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture(scope="session")
def project(docker: Docker, checkout: Path) -> Iterator[Compose]:
    """The project with its images built and no container running."""
    fill_wheelhouse(checkout)
    made = Compose(docker, checkout, ("docker-compose",))
    began = time.monotonic()
    made("build", "coordinator", "engine", "api", timeout=900)
    made.timings["build"] = time.monotonic() - began
    yield made
    images = [f"{PROJECT}-{kind}:test" for kind in ("coordinator", "server", "engine")]
    docker.run("docker", "image", "rm", "-f", *images)


@pytest.fixture(scope="module")
def compose(project: Compose) -> Iterator[Compose]:
    """The running project: a coordinator, two engines, the API and Prometheus."""
    began = time.monotonic()
    try:
        project("up", "-d", *SERVICES, timeout=200)
        project.timings["up"] = time.monotonic() - began
        until(lambda: fetch(f"{project.url}/ready").status == 200, "ready", within=120)
        project.timings["ready"] = time.monotonic() - began
        until(lambda: len(project.engines_up()) == 2, "two engines", within=120)
        project.timings["both engines"] = time.monotonic() - began
        yield project
    except BaseException:
        print(project.docker.run("docker-compose", "-p", PROJECT, "-f", str(project.file), "logs",
                                 "--tail", "40").stdout)  # fmt: skip
        raise
    finally:
        project("down", "-v", "--remove-orphans", timeout=200)
