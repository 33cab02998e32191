"""Containers of the images, as a cluster would run them: each a host of its own, without rights."""

import json
from contextlib import ExitStack

from tests.deploy.docker_engine import Docker
from tests.support.waiting import PATIENCE, until

USER = "1000660000:0"
"""A user that no file of the images knows: OpenShift gives each project its own, of group 0."""
SUBNET = "10.78.0"
IMAGES = {"coordinator": "coordinator", "api-server": "server", "engine": "engine"}


class Container:
    """One that runs."""

    def __init__(self, docker: Docker, name: str) -> None:
        self.name = name
        self._docker = docker

    def times_said(self, text: str) -> int:
        """Return in how many lines of its log a text is."""
        log = self._docker.output("docker", "logs", self.name)
        return sum(text in line for line in log.splitlines())

    def stop(self) -> None:
        """End it in order, as the kubelet does, and hold that it does so."""
        grace = int(2 * PATIENCE)
        self._docker.output("docker", "stop", "-t", str(grace), self.name, timeout=grace + 60)
        assert self._docker.inspect(self.name, "{{.State.ExitCode}}") == "0"
        self.remove()

    def show_log(self) -> None:
        """Print the end of its log, for a test that fails."""
        log = self._docker.run("docker", "logs", "--tail", "15", self.name).stdout
        print(f"{self.name}:", log, sep="\n")

    def remove(self) -> None:
        """End it without a word, for good; nothing happens if it has gone."""
        self._docker.run("docker", "rm", "-f", self.name)

    @property
    def address(self) -> str:
        """Its only IP address."""
        (network,) = json.loads(
            self._docker.inspect(self.name, "{{json .NetworkSettings.Networks}}")
        ).values()
        return str(network["IPAddress"])

    @property
    def url(self) -> str:
        return f"http://{self.address}:8000"

    @property
    def health(self) -> str:
        """Where it answers 200 when it is ready: of coordinators and engines."""
        return f"http://{self.address}:8080/ready"


class Fleet:
    """Containers on a network of their own, where they find each other by aliases.

    Args:
        options: of `docker run`, for all of them.
        flags: of `swell`, for all of them.
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
        """Run a command of `swell` in the image that has it."""
        self._number += 1
        name = f"swelltest-fleet-{self._number}"
        # An address of its own: one that has become free is given again at once.
        place = ("--network", self._network, "--ip", f"{SUBNET}.{self._number + 9}")
        named = () if alias is None else ("--network-alias", alias)
        return run(
            self.docker, self._running, name, command, *self._flags, *flags,
            options=(*place, *named, *self._options),
        )  # fmt: skip

    def cut_off(self, container: Container) -> None:
        """Take a container off the network: packets are lost, nobody is told."""
        self.docker.output("docker", "network", "disconnect", self._network, container.name)


def run(
    docker: Docker,
    running: ExitStack,
    name: str,
    command: str,
    *flags: str,
    options: tuple[str, ...],
) -> Container:
    """Run a command of `swell` as a user of the cluster's choice, with what the chart lets it."""
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
    """Wait until each of them has said something so often."""
    until(
        lambda: all(each.times_said(text) >= times for each in containers),
        f"{[each.name for each in containers]} say {text!r}", within, interval=0.2,
    )  # fmt: skip
