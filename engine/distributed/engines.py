"""The collectives of a lockstep group's engines, each of which can be several processes.

The engines' leaders exchange rows of integers before steps. Within steps all processes of all
engines exchange tensors.
"""

import socket
from collections.abc import Sequence

import torch
from msgspec.structs import replace

from engine.distributed.backend import open_store
from engine.distributed.group import (
    CPU,
    Bundle,
    Group,
    PendingRows,
    connect,
    could_not_join,
    join_group,
)
from engine.distributed.spec import GroupBroken, GroupSpec


class EngineGroup(Bundle):
    """One process's end of a group of engines; created by `join_engines`."""

    def __init__(self, spec: GroupSpec, leaders: Group | None, processes: Group) -> None:
        """Take ownership of the groups; only leaders have the first one."""
        super().__init__(leaders, processes)
        self.rank = spec.rank
        """Rank of this engine."""
        self.size = spec.size
        """Number of engines."""
        self.topology = spec.topology
        self.processes = processes
        """Group of all engines' processes; those of one engine have consecutive ranks."""
        self._leaders = leaders

    def all_gather_rows(self, row: Sequence[int]) -> PendingRows:
        """Start an all-gather of a row of integers between the engines.

        Raises:
            GroupBroken: the group has ended.
        """
        assert self._leaders is not None, "a worker"
        return self._leaders.all_gather_rows(row)


def join_engines(
    spec: GroupSpec,
    device: torch.device = CPU,
    listener: socket.socket | None = None,
    *,
    shard: int = 0,
    shards: int = 1,
) -> EngineGroup:
    """Rendezvous with all processes of all engines and connect to them.

    Args:
        spec: this engine's rank among the engines; the leader of rank 0 hosts the rendezvous.
        device: device of the exchanged tensors.
        listener: at the leader of rank 0, as for `join_group`; ownership is transferred.
        shard: index of this process in its engine; 0 leads.
        shards: number of processes per engine.

    Raises:
        GroupBroken: not all joined within the timeout, or the network failed.
    """
    if shards == 1:
        group = join_group(spec, device, listener)
        return EngineGroup(spec, group, group)
    everybody = replace(spec, rank=spec.rank * shards + shard, size=spec.size * shards)
    processes: Group | None = None
    try:
        store = open_store(everybody, listener)
        processes = connect(store, everybody, "processes/", device)
        if shard:
            return EngineGroup(spec, None, processes)
        leaders = Group(spec, None, None)
        if spec.size > 1:
            leaders = connect(store, spec, "leaders/", CPU)
    except (RuntimeError, OSError, GroupBroken) as error:
        if processes is not None:
            processes.close()
        raise could_not_join(everybody, error) from error
    return EngineGroup(spec, leaders, processes)
