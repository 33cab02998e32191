"""The groups of an engine's processes, which form a grid: pipeline stages by shards.

The shards of a stage are one group. Each shard is connected to the shard with the same index in the
previous and in the next stage, by groups of two, so that no stage waits for others' exchanges.
"""

import socket

import torch
from msgspec.structs import replace

from engine.distributed.backend import open_store
from engine.distributed.group import Bundle, Group, Transfer, connect, could_not_join
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.shared.addresses import address_towards, join_host_port

_EARLIER, _LATER = 0, 1
"""Ranks in a group of two."""


class Grid(Bundle):
    """One process's connections to its groups; created by `join_grid`."""

    def __init__(self, shards: Group, before: Group | None, after: Group | None) -> None:
        super().__init__(shards, before, after)
        self.shards = shards
        """The processes of its stage."""
        self._before = before
        self._after = after

    def begin_receive(self, states: torch.Tensor) -> Transfer:
        """Start receiving the next tensor of the previous stage into `states`.

        Raises:
            GroupBroken: a process has failed.
        """
        assert self._before is not None, "the first stage"
        return self._before.begin_receive(states, _EARLIER)

    def begin_send(self, states: torch.Tensor) -> Transfer:
        """Start sending a tensor to the next stage.

        Raises:
            GroupBroken: a process has failed.
        """
        assert self._after is not None, "the last stage"
        return self._after.begin_send(states, _LATER)


def join_grid(
    spec: GroupSpec,
    shape: tuple[int, int],
    position: tuple[int, int],
    device: torch.device,
    listener: socket.socket | None = None,
) -> Grid:
    """Rendezvous with all processes of an engine and connect to this one's neighbours.

    Args:
        spec: the rendezvous, and this process's rank among all.
        shape: number of stages, and shards per stage.
        position: stage and shard of this process.
        device: device of the exchanged tensors.
        listener: at rank 0, the result of `open_listener` for the spec's address; ownership is
            transferred.

    Raises:
        GroupBroken: not all joined within the timeout, or the network failed.
    """
    (stages, shards), (stage, shard) = shape, position

    def group(name: str, rank: int, size: int) -> Group:
        return connect(store, replace(spec, address=address, rank=rank, size=size), name, device)

    made: list[Group] = []
    before = after = None
    try:
        # The first rank of each group listens at its own node's address.
        host = spec.host if spec.rank == 0 else address_towards(spec.host, spec.port)
        address = join_host_port(host, spec.port)
        store = open_store(spec, listener)
        made.append(group(f"stage-{stage}/", shard, shards) if shards > 1 else Group.single())
        if stage > 0:
            before = group(f"link-{stage - 1}-{shard}/", _LATER, 2)
            made.append(before)
        if stage < stages - 1:
            after = group(f"link-{stage}-{shard}/", _EARLIER, 2)
    except (RuntimeError, OSError, GroupBroken) as error:
        for each in made:
            each.close()
        raise could_not_join(spec, error) from error
    return Grid(made[0], before, after)
