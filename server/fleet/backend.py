"""A node's role in its cluster, and where its engines run: local processes or Ray actors.

A node is standalone, the head that others join, or one that joins.
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
from server.fleet.roles import engine_role

logger = logging.getLogger(__name__)


class BadNode(ValueError):
    """Contradictory settings for the discovery of nodes."""


class Joining(NamedTuple):
    """A node's role in its cluster."""

    config: ServeConfig
    """With the coordinator's address, and all settings derived from the role."""
    leads: bool
    """Whether the node hosts the coordinator."""
    is_single_node: bool
    """Whether no other node can join."""
    is_new: bool = False
    """Whether the cluster key is new, so that no process of an earlier run can remain."""


def joining(config: ServeConfig, local_address: str) -> Joining:
    """Return a node's role, derived from its settings.

    Args:
        local_address: coordinator address reachable only from this node.

    Raises:
        BadNode: settings contradict each other, or one is missing.
        OSError: the head's name cannot be resolved.
    """
    nodes, coordinator = config.nodes, config.cluster.coordinator
    address = nodes.data_parallel_address
    if address is not None and coordinator is not None:
        raise BadNode("--data-parallel-address and --coordinator are alternatives: give only one")
    if nodes.headless:
        if address is None and coordinator is None:
            raise BadNode("--headless needs --data-parallel-address, the head node to join")
        patience = max(config.cluster.join_timeout, config.supervisor.startup_timeout)
        config = config.changed(
            supervisor={"api_server_count": 0}, cluster={"join_timeout": patience}
        )
    if coordinator is not None:
        return Joining(config, leads=False, is_single_node=False)
    if address is None:
        config = config.changed(cluster={"coordinator": local_address})
        if config.parallel.rank_on_node(0) is None:
            config = config.changed(parallel={"data_parallel_start_rank": 0})
        return Joining(config, leads=True, is_single_node=True)
    if not nodes.headless:
        rank = config.parallel.data_parallel_rank or config.parallel.data_parallel_start_rank
        if rank:
            raise BadNode(
                f"rank {rank} is not the first node's, which is the one that {address} names: add "
                "--headless for a node with engines only, or replace --data-parallel-address by "
                f"--coordinator {join_host_port(address, nodes.data_parallel_rpc_port)} for one "
                "with API servers of its own"
            )
        # Sockets can only bind to addresses, not names.
        try:
            address = resolve(address)[1][0]
        except OSError as error:
            raise OSError(
                f"--data-parallel-address {address} cannot be resolved: {error}"
            ) from error
    coordinator = join_host_port(address, nodes.data_parallel_rpc_port)
    config = config.changed(cluster={"coordinator": coordinator})
    return Joining(config, leads=not nodes.headless, is_single_node=False)


def check_span(config: ServeConfig) -> None:
    """Check the settings of an engine that spans nodes.

    Raises:
        BadNode: a setting does not work with such an engine.
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
    """Engines cannot run with these settings; the message is user-facing."""


class ProcessBackend:
    """Creates roles of engines that run as processes of this node.

    The supervisor decides their lifecycle. `server.fleet.ray.backend` is the alternative.
    """

    def __init__(self, config: ServeConfig, directory: Path) -> None:
        """Plan the node; raises what `joining` does.

        Raises:
            CannotServe: the lists of `--cpu-bind` do not fit the machine or the engines.
        """
        self.joined = joining(config, f"ipc://{directory}/coordinator")
        """The node's role in its cluster, with the derived settings."""
        self.has_all = self.joined.is_single_node
        """Whether all engines of the cluster are under this supervisor."""
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

    def engine_role(self, config: ServeConfig, slot: int, *, numbered: bool) -> Role:
        """Return the role of one engine of this node."""
        config = config.changed(executor={"cpu_bind": self._cpus.of_engine(slot)})
        return engine_role(config, slot, numbered=numbered)

    def api_server_role(self, config: ServeConfig, node: str, port: int) -> Role | None:
        """Return None: all engines are on the supervisor's node."""
        return None

    def close(self) -> None:
        """Do nothing: nothing was reserved."""
