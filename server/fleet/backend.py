"""A node's role in its cluster, and where its engines run: processes here, or Ray's actors.

A node is alone, the head that others join, or one that joins.
"""

import logging
from pathlib import Path
from typing import NamedTuple

from engine.shared.addresses import join_host_port, resolve
from engine.shared.cpu.lists import CpuList
from engine.shared.cpu.plan import BadCpuBind
from server.config import ServeConfig
from server.fleet.keeper import Role
from server.fleet.node_resources import plan_cpus
from server.fleet.places import engine_role

logger = logging.getLogger(__name__)


class BadNode(ValueError):
    """The settings by which nodes find each other are contradictory."""


class Joining(NamedTuple):
    """A node's place in its cluster."""

    config: ServeConfig
    """With the coordinator's address, and all that follows from the role."""
    leads: bool
    """Whether the node hosts the coordinator."""
    is_alone: bool
    """Whether no other node can join."""
    is_new: bool = False
    """Whether the cluster key is new, so that no process of an earlier run can be left."""


def joining(config: ServeConfig, local_address: str) -> Joining:
    """Return what the settings make of a node.

    Args:
        local_address: where a coordinator listens that only this node reaches.

    Raises:
        BadNode: a setting contradicts another, or lacks one.
        OSError: the head's name cannot be resolved.
    """
    nodes, coordinator = config.nodes, config.cluster.coordinator
    address = nodes.data_parallel_address
    if address is not None and coordinator is not None:
        raise BadNode("--data-parallel-address and --coordinator say the same: give one of them")
    if nodes.headless:
        if address is None and coordinator is None:
            raise BadNode("--headless needs --data-parallel-address, the head node to join")
        patience = max(config.cluster.join_timeout, config.supervisor.startup_timeout)
        config = config.changed(
            supervisor={"api_server_count": 0}, cluster={"join_timeout": patience}
        )
    if coordinator is not None:
        return Joining(config, leads=False, is_alone=False)
    if address is None:
        config = config.changed(cluster={"coordinator": local_address})
        if config.parallel.rank_on_node(0) is None:
            config = config.changed(parallel={"data_parallel_start_rank": 0})
        return Joining(config, leads=True, is_alone=True)
    if not nodes.headless:
        rank = config.parallel.data_parallel_rank or config.parallel.data_parallel_start_rank
        if rank:
            raise BadNode(
                f"rank {rank} is not the first node's, which is the one that {address} names: add "
                "--headless for a node with engines only, or replace --data-parallel-address by "
                f"--coordinator {join_host_port(address, nodes.data_parallel_rpc_port)} for one "
                "with API servers of its own"
            )
        # Sockets take no names to listen on.
        try:
            address = resolve(address)[1][0]
        except OSError as error:
            raise OSError(
                f"--data-parallel-address {address} cannot be resolved: {error}"
            ) from error
    coordinator = join_host_port(address, nodes.data_parallel_rpc_port)
    config = config.changed(cluster={"coordinator": coordinator})
    return Joining(config, leads=not nodes.headless, is_alone=False)


def check_span(config: ServeConfig) -> None:
    """Check the settings of an engine that spans nodes.

    Raises:
        BadNode: they ask for more than that engine.
    """
    if config.parallel.nnodes == 1:
        return
    if config.ray.data_parallel_backend == "ray":
        raise BadNode("--nnodes is for plain nodes: leave out --data-parallel-backend ray")
    nodes = config.nodes
    if nodes.headless or nodes.data_parallel_address or config.cluster.coordinator:
        raise BadNode(
            "--nnodes has one engine, whose coordinator and API servers are on the first node: "
            "leave out --headless, --data-parallel-address and --coordinator"
        )
    if config.parallel.engines_on_node != 1:
        raise BadNode("--nnodes has one engine: leave out --data-parallel-size-local")


class CannotServe(Exception):
    """Engines cannot be run as the settings ask; the message is for people."""


class ProcessBackend:
    """Makes the places of engines as processes of this node.

    What happens in them is the supervisor's policy. `server.fleet.ray.backend` has the other kind.
    """

    def __init__(self, config: ServeConfig, directory: Path) -> None:
        """Make it; raises what `joining` does.

        Raises:
            CannotServe: the lists of `--cpu-bind` do not fit the machine or the engines.
        """
        self.joined = joining(config, f"ipc://{directory}/coordinator")
        """The node's place in its cluster, with the settings that follow from it."""
        self.has_all = self.joined.is_alone
        """Whether the engines of all nodes are here, so that no other supervisor has a share."""
        config = self.joined.config
        others = config.supervisor.api_server_count + (1 if self.joined.leads else 0)
        try:
            self._cpus = plan_cpus(config.engine(), others=others)
        except BadCpuBind as error:
            raise CannotServe(str(error)) from error
        self.cpus_of_others: CpuList = self._cpus.others
        """CPUs of this node's front ends and coordinator; empty: any."""
        if not self._cpus.engines:
            logger.debug("engines run on any CPU: %s", self._cpus.reason)

    def engine_role(self, config: ServeConfig, place: int, *, numbered: bool) -> Role:
        """Return the place of one engine of this node."""
        config = config.changed(executor={"cpu_bind": self._cpus.of_engine(place)})
        return engine_role(config, place, numbered=numbered)

    def api_server_role(self, config: ServeConfig, node: str, port: int) -> Role | None:
        """Return None: all engines are on the supervisor's node."""
        return None

    def close(self) -> None:
        """Do nothing: nothing was reserved."""
