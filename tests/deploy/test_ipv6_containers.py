"""An IPv6-only cluster: pods find each other by name and serve requests."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.deploy.conftest import Compose
from tests.deploy.containers import Container, run
from tests.deploy.docker_engine import Docker
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]

COORDINATOR = "coordinator"
SWITCH = f"swell6-{os.getpid()}"
ASK = """
import json, sys, urllib.request
url, body = sys.argv[1], json.dumps({"prompt": "ROMEO:", "max_tokens": 5}).encode()
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def command(*words: str) -> str:
    """Run a command on the host; skip the test if the kernel has no IPv6."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Pods:
    """Network namespaces held by sleeping containers, like pods, on a separate switch."""

    def __init__(self, docker: Docker, running: ExitStack) -> None:
        self._docker = docker
        self._running = running
        self._number = 0
        command("ip", "netns", "add", SWITCH)
        running.callback(command, "ip", "netns", "delete", SWITCH)
        command("ip", "-n", SWITCH, "link", "add", "br0", "type", "bridge")
        command("ip", "-n", SWITCH, "link", "set", "br0", "up")

    def start(self, words: tuple[str, ...], variables: dict[str, str]) -> tuple[Container, str]:
        """Run a `swell` command in a new pod; return its container and IP address."""
        self._number += 1
        address, holder = f"fd77::{self._number}", f"swelltest-pod-{self._number}"
        self._running.callback(self._docker.run, "docker", "rm", "-f", holder)
        self._docker.output(
            "docker", "run", "-d", "--name", holder, "--network", "none",
            "--sysctl", "net.ipv6.conf.all.disable_ipv6=0", "--add-host", f"{COORDINATOR}:fd77::1",
            "--entrypoint", "sleep", "swelltest-coordinator:test", "infinity",
        )  # fmt: skip
        self._plug(self._docker.inspect(holder, "{{.State.Pid}}"), address)
        options = [part for name, value in variables.items() for part in ("-e", f"{name}={value}")]
        container = run(
            self._docker, self._running, f"{holder}-swell", *words,
            options=("--network", f"container:{holder}", *options),
        )  # fmt: skip
        return container, address

    def _plug(self, process: str, address: str) -> None:
        near, far = f"p{self._number}", f"e{self._number}"
        command("ip", "-n", SWITCH, "link", "add", near, "type", "veth", "peer", "name", far,
                "netns", process)  # fmt: skip
        command("ip", "-n", SWITCH, "link", "set", near, "master", "br0", "up")
        inside = ("nsenter", "-t", process, "-n", "ip")
        command(*inside, "address", "add", f"{address}/64", "dev", far, "nodad")
        command(*inside, "link", "set", far, "up")


@pytest.fixture
def pods(project: Compose) -> Iterator[Pods]:
    for program in ("ip", "nsenter"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: iproute2, util-linux)")
    with ExitStack() as running:
        yield Pods(project.docker, running)


def test_containers_serve_on_ipv6_only_network(pods: Pods, project: Compose) -> None:
    trusting = {"SWELL_INSECURE_CLUSTER": "true"}
    join = ("--coordinator", f"{COORDINATOR}:7550")
    coordinator, _ = pods.start(("coordinator",), {**trusting, "SWELL_ADVERTISE_HOST": COORDINATOR})
    pods.start(("engine", *join, "--executor", "simulated"), trusting)
    front, address = pods.start(("api-server", *join), trusting)
    docker = project.docker

    def probe() -> bool:
        asked = docker.run("docker", "exec", front.name, "python3", "-P", "-m", "engine.probe",
                           "SWELL_PORT", "/ready")  # fmt: skip
        return asked.returncode == 0

    until(probe, "the API server is ready, by its own probe", 3 * PATIENCE, 0.5)
    url = f"http://[{address}]:8000/v1/completions"
    told = docker.output("docker", "exec", coordinator.name, "python3", "-c", ASK, url)
    assert json.loads(told)["usage"]["completion_tokens"] == 5
    routes = docker.output("docker", "exec", coordinator.name, "cat", "/proc/net/route")
    assert len(routes.splitlines()) == 1, "IPv4 leads nowhere"
