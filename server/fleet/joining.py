"""A node's role in its cluster: alone, the head that others join, or one that joins."""

from typing import NamedTuple

from engine.shared.addresses import join_host_port, resolve
from server.config import ServeConfig


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
        address = _own_address(address)
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


def _own_address(name: str) -> str:
    """Return the address to listen on, for which sockets take no names."""
    try:
        return resolve(name)[1][0]
    except OSError as error:
        raise OSError(f"--data-parallel-address {name} cannot be resolved: {error}") from error
