"""Opens the KV block port of an engine with a role in disaggregated prefill."""

from pathlib import Path
from typing import NamedTuple

import zmq

from engine.kv_tiers.opening import KvMemory, require_host_memory, tier_setting
from engine.kv_transfer.port import BlockPort
from engine.kv_transfer.settings import BadKvTransfer, Role, read_transfer
from engine.shared.addresses import is_loopback, join_host_port
from engine.shared.cluster_keys import InsecureCluster
from engine.shared.config import ClusterConfig, EngineConfig
from engine.shared.messages import EngineCounters
from engine.shared.transport import Transport, advertised_host, bound_address


class OpenedPort(NamedTuple):
    """A port whose thread runs, with its role and public address."""

    port: BlockPort
    role: Role
    address: str
    """Address where others read the engine's offers; empty if it offers nothing."""


def open_port(
    config: EngineConfig,
    executor: KvMemory,
    context: "zmq.Context[zmq.Socket[bytes]]",
    *,
    rank: int,
    incarnation: int,
    counters: EngineCounters,
) -> OpenedPort | None:
    """Return the port of an engine, or None if it has no role.

    Raises:
        BadKvTransfer: the settings are invalid, or the socket cannot be bound.
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
        raise BadKvTransfer(f"{tier_setting(config)}: {address}: {error}") from error
    reported_address = ""
    if port.bound_to is not None:
        reported_address = bound_address(port.bound_to, advertised_host(config.cluster))
    port.start()
    return OpenedPort(port, transfer.role, reported_address)


def _address(cluster: ClusterConfig, incarnation: int) -> str:
    """Return the address to bind: ipc, loopback or TCP, like the coordinator's."""
    coordinator = cluster.coordinator_address
    if coordinator.startswith("ipc://"):
        directory = Path(coordinator.removeprefix("ipc://")).parent
        return f"ipc://{directory / f'{incarnation:x}-blocks'}"
    host = advertised_host(cluster)
    return f"tcp://{join_host_port(host if is_loopback(host) else '*', '*')}"
