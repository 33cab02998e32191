"""Containers of the images, run as in a cluster: each is a separate, unprivileged host."""

import json
from contextlib import ExitStack

from tests.deploy.docker_engine import Docker
from tests.support.waiting import PATIENCE, until

USER = "1000660000:0"
"""A user missing from the images' /etc/passwd, in group 0, as OpenShift assigns per project."""
SUBNET = "10.78.0"
IMAGES = {"coordinator": "coordinator", "api-server": "server", "engine": "engine"}


class Container:
    """A running container."""

    def __init__(self, docker: Docker, name: str) -> None:
        self.name = name
        self._docker = docker

    def times_said(self, text: str) -> int:
        """Return the number of log lines that contain the text."""
        log = self._docker.output("docker", "logs", self.name)
        return sum(text in line for line in log.splitlines())

    def stop(self) -> None:
        """Stop it gracefully, like the kubelet, and assert that it exits cleanly."""
        grace = int(2 * PATIENCE)
        self._docker.output("docker", "stop", "-t", str(grace), self.name, timeout=grace + 60)
        assert self._docker.inspect(self.name, "{{.State.ExitCode}}") == "0"
        self.remove()

    def show_log(self) -> None:
        """Print the end of its log, for failing tests."""
        log = self._docker.run("docker", "logs", "--tail", "15", self.name).stdout
        print(f"{self.name}:", log, sep="\n")

    def remove(self) -> None:
        """Kill and remove it; idempotent."""
        self._docker.run("docker", "rm", "-f", self.name)

    @property
    def address(self) -> str:
        """The container's only IP address."""
        (network,) = json.loads(
            self._docker.inspect(self.name, "{{json .NetworkSettings.Networks}}")
        ).values()
        return str(network["IPAddress"])

    @property
    def url(self) -> str:
        return f"http://{self.address}:8000"

    @property
    def health(self) -> str:
        """URL of a coordinator or engine that returns 200 when it is ready."""
        return f"http://{self.address}:8080/ready"


class Fleet:
    """Containers on a separate network, on which they find each other by alias.

    Args:
        options: options of `docker run` for all containers.
        flags: flags of `swell` for all containers.
    """

    def __init__(
        self, docker: Docker, running: ExitStack, options: tuple[str, ...], flags: tuple[str, ...]
    ) -> None:
        self.docker = docker
        self._running = running
        self._options = options
        self._flags = flags
        self._number = 0
        self._network = "swelltest-fleet"
        docker.output("docker", "network", "create", "--subnet", f"{SUBNET}.0/24",
                      self._network)  # fmt: skip
        running.callback(docker.run, "docker", "network", "rm", self._network)

    def start(self, command: str, *flags: str, alias: str | None = None) -> Container:
        """Run a `swell` command in its image."""
        self._number += 1
        name = f"swelltest-fleet-{self._number}"
        # Use a new address, because Docker reuses released addresses at once.
        place = ("--network", self._network, "--ip", f"{SUBNET}.{self._number + 9}")
        named = () if alias is None else ("--network-alias", alias)
        return run(
            self.docker, self._running, name, command, *self._flags, *flags,
            options=(*place, *named, *self._options),
        )  # fmt: skip

    def cut_off(self, container: Container) -> None:
        """Disconnect a container silently: packets are lost, without resets."""
        self.docker.output("docker", "network", "disconnect", self._network, container.name)


def run(
    docker: Docker,
    running: ExitStack,
    name: str,
    command: str,
    *flags: str,
    options: tuple[str, ...],
) -> Container:
    """Run a `swell` command as an arbitrary user, with the privileges that the chart grants."""
    container = Container(docker, name)

    def end(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            container.show_log()
        container.remove()

    running.push(end)
    docker.output(
        "docker", "run", "-d", "--name", name, "--user", USER, "--read-only", "--tmpfs", "/tmp",
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges", *options,
        f"swelltest-{IMAGES[command]}:test", command, *flags,
    )  # fmt: skip
    return container


def say(containers: list[Container], text: str, times: int = 1, within: float = PATIENCE) -> None:
    """Wait until each container has logged a text this many times."""
    until(
        lambda: all(each.times_said(text) >= times for each in containers),
        f"{[each.name for each in containers]} say {text!r}", within, interval=0.2,
    )  # fmt: skip
