"""The groups of an engine's processes, which are a grid: pipeline stages by shards.

The shards of a stage are one group. Each shard is linked with those of its number in the stage
before and in the stage after, by groups of two, so that no stage waits for what others exchange.
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
    """One process's connections to its groups; made by `join_grid`."""

    def __init__(self, shards: Group, before: Group | None, after: Group | None) -> None:
        super().__init__(shards, before, after)
        self.shards = shards
        """The processes of its stage."""
        self._before = before
        self._after = after

    def begin_receive(self, states: torch.Tensor) -> Transfer:
        """Begin to fill a tensor with the next one that the stage before sends.

        Raises:
            GroupBroken: a process has failed.
        """
        assert self._before is not None, "the first stage"
        return self._before.begin_receive(states, _EARLIER)

    def begin_send(self, states: torch.Tensor) -> Transfer:
        """Begin to send a tensor to the stage after.

        Raises:
            GroupBroken: a process has failed.
        """
        assert self._after is not None, "the last stage"
        return self._after.begin_send(states, _LATER)


def join_grid(
    spec: GroupSpec,
    shape: tuple[int, int],
    place: tuple[int, int],
    device: torch.device,
    listener: socket.socket | None = None,
) -> Grid:
    """Meet all processes of an engine and connect to those that this one works with.

    Args:
        spec: where all of them meet, and this one's rank among them.
        shape: stages, and shards of each.
        place: of this process: its stage and its shard.
        device: where the tensors are that are exchanged.
        listener: at rank 0, what `open_listener` returned for the spec's address; taken over.

    Raises:
        GroupBroken: not everybody came within the timeout, or the network fails.
    """
    (stages, shards), (stage, shard) = shape, place

    def group(name: str, rank: int, size: int) -> Group:
        return connect(store, replace(spec, address=address, rank=rank, size=size), name, device)

    made: list[Group] = []
    before = after = None
    try:
        # Whoever is first in a group listens under its address, on whatever node it is.
        host = spec.host if spec.rank == 0 else address_towards(spec.host, spec.port)
        address = join_host_port(host, spec.port)
        store = open_store(spec, listener)
        made.append(group(f"stage-{stage}/", shard, shards) if shards > 1 else Group.alone())
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
