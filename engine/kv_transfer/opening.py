"""Opens the port for KV blocks of an engine that has a role in a split."""

from pathlib import Path
from typing import NamedTuple

import zmq

from engine.kv_tiers.opening import KvMemory, asking, require_host_memory
from engine.kv_transfer.port import BlockPort
from engine.kv_transfer.settings import BadKvTransfer, Role, read_transfer
from engine.shared.addresses import is_loopback, join_host_port
from engine.shared.cluster_keys import InsecureCluster
from engine.shared.config import ClusterConfig, EngineConfig
from engine.shared.messages import EngineCounters
from engine.shared.transport import Transport, advertised_host, bound_address


class OpenedPort(NamedTuple):
    """A port whose thread runs, and what others are told of it."""

    port: BlockPort
    role: Role
    address: str
    """Where others read what the engine offers; empty if it offers nothing."""


def open_port(
    config: EngineConfig,
    executor: KvMemory,
    context: "zmq.Context[zmq.Socket[bytes]]",
    *,
    rank: int,
    incarnation: int,
    counters: EngineCounters,
) -> OpenedPort | None:
    """Return the port of an engine, or None if it is started without a role.

    Raises:
        BadKvTransfer: the settings are wrong, or the socket cannot be bound.
        BadTiers: the KV cache is on a device.
    """
    transfer = read_transfer(config.cache, rank)
    if transfer is None or transfer.role is None:
        return None
    require_host_memory(config, executor)
    address = None
    try:
        if transfer.role != "decode":
            address = _address(config.cluster, incarnation)
        port = BlockPort(
            Transport(config.cluster, context),
            address,
            incarnation=incarnation,
            block_bytes=len(executor.read_block(0)),
            max_offered_bytes=transfer.max_bytes,
            counters=counters,
        )
    except (InsecureCluster, OSError, ValueError, zmq.ZMQError) as error:
        raise BadKvTransfer(f"{asking(config)}: {address}: {error}") from error
    told = ""
    if port.bound_to is not None:
        told = bound_address(port.bound_to, advertised_host(config.cluster))
    port.start()
    return OpenedPort(port, transfer.role, told)


def _address(cluster: ClusterConfig, incarnation: int) -> str:
    """Return where to bind: as near as the coordinator is."""
    coordinator = cluster.coordinator_address
    if coordinator.startswith("ipc://"):
        directory = Path(coordinator.removeprefix("ipc://")).parent
        return f"ipc://{directory / f'{incarnation:x}-blocks'}"
    host = advertised_host(cluster)
    return f"tcp://{join_host_port(host if is_loopback(host) else '*', '*')}"
