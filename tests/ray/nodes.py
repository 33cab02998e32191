"""A real Ray cluster of several nodes on this machine, and what is in it."""

import argparse
import os
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

import psutil
import ray
from ray.cluster_utils import Cluster

from tests.support.waiting import PATIENCE

NAMESPACE = "of these nodes"

OBJECT_STORE_BYTES = 80 * 2**20  # about the least that Ray takes

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


class Options(NamedTuple):
    """How much a benchmark of engines on Ray does."""

    rounds: int
    streams: int
    tokens: int
    """Per stream."""
    serve: list[str]
    """Flags for `swell serve`."""


def read_options(description: str | None, *, rounds: int, streams: int, tokens: int) -> Options:
    """Return what the command line asks for, with these defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--streams", type=int, default=streams)
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens per stream")
    parser.add_argument("serve", nargs="*", help="flags for `swell serve`, after --")
    return Options(**vars(parser.parse_args()))


class Nodes:
    """A head and worker nodes as a context manager.

    Args:
        slots: of each node, the head first: how many of `{"CPU": 1}` it has.
    """

    looked_at = ""
    """Address of the cluster to which this process is connected: one at a time."""

    def __init__(self, *slots: int) -> None:
        self._slots = slots
        self._added = 1

    def __enter__(self) -> "Nodes":
        head, *others = self._slots
        self.cluster = Cluster(initialize_head=True, head_node_args=_arguments(head))
        for slots in others:
            self.add(slots)
        return self

    def _look(self) -> None:
        """Have this process look at this cluster."""
        if Nodes.looked_at != self.address:
            ray.shutdown()
            ray.init(
                address=self.address,
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
            )
            Nodes.looked_at = self.address

    @property
    def address(self) -> str:
        """HOST:PORT for `--ray-address`."""
        return str(self.cluster.address)

    def add(self, slots: int) -> Any:
        """Have another node join; return it."""
        self._added += 1
        return self.cluster.add_node(node_ip_address=f"127.0.0.{self._added}", **_arguments(slots))

    def lose(self, address: str) -> None:
        """Kill the raylet of a node, as if the machine had gone."""
        node = next(n for n in self.cluster.worker_nodes if n.node_ip_address == address)
        self.cluster.remove_node(node, allow_graceful=False)

    @property
    def head_address(self) -> str:
        """The head's address."""
        return str(self.cluster.head_node.node_ip_address)

    def groups(self) -> list[dict[str, Any]]:
        """Return the placement groups that have not been removed."""
        self._look()
        table = ray.util.placement_group_table()
        return [each for each in table.values() if each["state"] != "REMOVED"]

    def make_group(
        self, name: str, node: str, *bundles: dict[str, float], strategy: str = "STRICT_PACK"
    ) -> Any:
        """Make a placement group on one node; return its handle."""
        self._look()
        node_id = next(n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == node)
        group = ray.util.placement_group(
            list(bundles),
            name=name,
            strategy=strategy,
            bundle_label_selector=[{"ray.io/node-id": node_id}] * len(bundles),
        )
        assert group.wait(PATIENCE)
        return group

    def remove_group(self, group: Any) -> None:
        """Remove a placement group."""
        ray.util.remove_placement_group(group)

    def actors(self) -> list[dict[str, Any]]:
        """Return the living actors."""
        self._look()
        found = ray._private.state.actors().values()
        return [each for each in found if each["State"] != "DEAD"]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if Nodes.looked_at == self.address:
            ray.shutdown()
            Nodes.looked_at = ""
        with suppress(Exception):
            self.cluster.shutdown()


def _arguments(slots: int) -> dict[str, Any]:
    return {
        "num_cpus": slots,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }


def engines() -> list[psutil.Process]:
    """Return the engine processes on this machine that actors of Ray have started."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            title = " ".join(each.cmdline()).strip()
            parent = each.parent()
            by_ray = parent is not None and " ".join(parent.cmdline()).startswith("ray::")
            if by_ray and title.startswith("swell: engine"):
                found.append(each)
    return found


def is_empty(nodes: Nodes) -> bool:
    """Whether no engine, actor or placement group is left."""
    return not (nodes.groups() or nodes.actors() or engines())
