"""Several hosts on one machine: network namespaces joined by a switch, one address each.

The switch has its own namespace; every node has one link to it, which can be cut. The
caller's namespace has an address too, so that tests can reach servers on the nodes.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.waiting import PATIENCE

_numbers = itertools.count()


class NoNamespaces(Exception):
    """Network namespaces cannot be created here; the message gives the reason."""


def _ip(*arguments: str) -> None:
    run = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=PATIENCE)
    if run.returncode:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {run.stderr.strip()}")


class Network:
    """A switch and its nodes, as a context manager; addresses are 10.77.0.1 and on.

    Raises:
        NoNamespaces: not root, no `ip` command, or a kernel that refuses.
    """

    def __init__(self, num_nodes: int) -> None:
        self._id = f"sw{os.getpid() % 100000}{next(_numbers)}"
        self._switch = f"{self._id}-switch"
        self.nodes = [f"{self._id}-n{number}" for number in range(num_nodes)]
        self._made: list[str] = []

    def address(self, node: int) -> str:
        """Return a node's IP address."""
        return f"10.77.0.{node + 1}"

    def __enter__(self) -> "Network":
        if os.geteuid():
            raise NoNamespaces("making network namespaces needs root")
        if shutil.which("ip") is None:
            raise NoNamespaces("the ip command (iproute2) is not installed")
        try:
            self._build()
        except NoNamespaces:
            self._remove()
            raise
        return self

    def _build(self) -> None:
        for name in (self._switch, *self.nodes):
            _ip("netns", "add", name)
            self._made.append(name)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for number, name in enumerate(self.nodes):
            self._plug(number, ("netns", name), self.address(number))
            _ip("-n", name, "link", "set", "lo", "up")
        self._plug(200, ("netns", str(os.getpid())), "10.77.0.200")

    def _plug(self, port: int, place: tuple[str, str], address: str) -> None:
        """Create a link from the switch to a namespace and assign its address there."""
        near, far = f"p{port}", f"{self._id}e{port}"
        switch = ("-n", self._switch)
        _ip(*switch, "link", "add", near, "type", "veth", "peer", "name", far)
        _ip(*switch, "link", "set", near, "master", "br0", "up")
        _ip(*switch, "link", "set", far, *place)
        inside = () if place[1] == str(os.getpid()) else ("-n", place[1])
        _ip(*inside, "address", "add", f"{address}/24", "dev", far)
        _ip(*inside, "link", "set", far, "up")

    def name(self, name: str, node: int) -> None:
        """Make a node resolvable by name on all nodes; takes effect on running nodes at once."""
        for each in self.nodes:
            # `ip netns exec` mounts it over /etc/hosts.
            hosts = Path("/etc/netns") / each / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n{self.address(node)} {name}\n")

    def cut(self, node: int) -> None:
        """Take a node's link down silently: packets are lost, without resets."""
        _ip("-n", self._switch, "link", "set", f"p{node}", "down")

    def restore(self, node: int) -> None:
        """Bring a node's link up again."""
        _ip("-n", self._switch, "link", "set", f"p{node}", "up")

    def command(self, node: int, *command: str) -> list[str]:
        """Return a command line that runs on a node."""
        return ["ip", "netns", "exec", self.nodes[node], *command]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self._made:
            _ip("netns", "delete", name)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        self._made.clear()


@contextmanager
def network_or_skip(nodes: int) -> Iterator[Network]:
    """Yield a network with this many nodes; skip the test if it cannot be created."""
    try:
        with Network(nodes) as made:
            yield made
    except NoNamespaces as reason:
        pytest.skip(str(reason))
