"""A group of processes for collectives, which can be torn down and formed again.

A group has two sets of connections, so that the small exchange before a step never waits for, or
mixes with, the tensors of a step that is still running. If tensors are on devices there is a third
set: the integers that announce row counts are always exchanged between CPUs.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from engine.distributed.backend import Backend, Connections, first_line, open_store
from engine.distributed.spec import GroupBroken, GroupSpec

_POLL_INTERVAL = 0.25
"""Seconds between checks for departed members while waiting for a collective."""
_GRACE = 0.25
"""Seconds for data of a departed member to arrive."""
CPU = torch.device("cpu")


@dataclass(eq=False)
class PendingRows:
    """A pending all-gather of one row of integers per rank."""

    group: "Group"
    work: Work | None
    table: Tensor

    def done(self) -> bool:
        """Return whether `wait` returns, or raises, immediately."""
        return self.work is None or self.work.is_completed()

    def wait_for(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether `wait` now returns, or raises, immediately."""
        return self.work is None or self.group.wait_for(self.work, seconds)

    def wait(self) -> list[list[int]]:
        """Return the rows of all ranks, in rank order.

        Raises:
            GroupBroken: a rank's row did not arrive.
        """
        if self.work is not None:
            self.group.finish(self.work)
        rows: list[list[int]] = self.table.tolist()
        return rows


@dataclass(eq=False)
class Transfer:
    """A pending point-to-point transfer; the tensor must not be modified until it completes."""

    group: "Group"
    work: Work
    values: Tensor

    def wait(self) -> Tensor:
        """Wait for the transfer and return the tensor.

        Raises:
            GroupBroken: the other member has failed.
        """
        self.group.finish(self.work, watched=False)
        return self.values


class Group:
    """One process's end of a group; created by `join_group`."""

    def __init__(
        self,
        spec: GroupSpec,
        rows: Connections | None,
        tensors: Connections | None,
        counts: Connections | None = None,
    ) -> None:
        """Take ownership of the connections; `counts` defaults to `tensors`, for tensors on
        CPUs."""
        self.rank = spec.rank
        self.size = spec.size
        self.topology = spec.topology
        self._rows = rows
        self._tensors = tensors
        self._counts = counts or tensors
        self._all = [each for each in (rows, tensors, counts) if each is not None]
        self._is_over = threading.Event()
        self._departed_at: float | None = None
        self._stuck: list[Work] = []
        """Unfinished collectives that were abandoned."""

    @classmethod
    def single(cls) -> "Group":
        """Return a group of size one, which needs no network."""
        return cls(GroupSpec("", rank=0, size=1, topology=0, timeout_s=0.0), None, None)

    @property
    def is_over(self) -> bool:
        """Whether it was closed or aborted, or has failed."""
        return self._is_over.is_set()

    def all_gather_rows(self, row: Sequence[int]) -> PendingRows:
        """Start an all-gather of a row of integers, of equal length on all ranks, besides steps.

        Raises:
            GroupBroken: the group has ended.
        """
        return self._gather(self._rows, row)

    def _gather(self, connections: Connections | None, row: Sequence[int]) -> PendingRows:
        own_row = torch.tensor([row], dtype=torch.int64)
        if connections is None:
            self._check()
            return PendingRows(self, None, own_row)
        table = torch.empty(self.size, len(row), dtype=torch.int64)
        with self._launching():
            return PendingRows(self, connections.backend._allgather_base(table, own_row), table)

    def all_gather_counts(self, count: int) -> list[int]:
        """All-gather one integer, ordered with the collectives on tensors.

        Raises:
            GroupBroken: a member has failed.
        """
        return self.all_to_all_counts([count] * self.size)

    def all_to_all_counts(self, counts: Sequence[int]) -> list[int]:
        """Send `counts[r]` to rank r; return the received integers in rank order.

        Raises:
            GroupBroken: a member has failed.
        """
        if self._counts is None:
            self._check()
            return list(counts)
        ones = [1] * self.size
        sent = torch.tensor(counts, dtype=torch.int64)
        received = torch.empty_like(sent)
        with self._launching():
            work = self._counts.backend.alltoall_base(received, sent, ones, ones)
        self.finish(work)
        numbers: list[int] = received.tolist()
        return numbers

    def all_gather_row(self, row: Sequence[int]) -> list[list[int]]:
        """All-gather a row of integers, of equal length on all ranks, ordered like counts.

        Raises:
            GroupBroken: a member has failed.
        """
        return self._gather(self._counts, row).wait()

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[r]` of the rows [rows, ...], in order, to rank r; return the received rows.

        Args:
            received: number of rows from each rank; they are returned in rank order.

        Raises:
            GroupBroken: a member has failed.
        """
        if self._tensors is None:
            self._check()
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        with self._launching():
            work = self._tensors.backend.alltoall_base(
                out, rows.contiguous(), list(received), list(sent)
            )
        self.finish(work, watched=self._tensors.is_watched)
        return out

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows [counts[rank], ...] of all ranks, in rank order.

        Raises:
            GroupBroken: a member has failed.
        """
        if self._tensors is None:
            self._check()
            return rows
        all_rows = rows.expand(self.size, *rows.shape).flatten(0, 1)
        return self.all_to_all(all_rows, [len(rows)] * self.size, counts)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum the values over all ranks, in place; results are bitwise equal on all ranks.

        Raises:
            GroupBroken: a member has failed.
        """
        return self._in_place(values, lambda backend: backend.allreduce([values]))

    def broadcast(self, values: Tensor) -> Tensor:
        """Replace the values, in place, by those of rank 0.

        Raises:
            GroupBroken: a member has failed.
        """
        return self._in_place(values, lambda backend: backend.broadcast([values]))

    def begin_send(self, values: Tensor, rank: int) -> Transfer:
        """Start sending a tensor to another member.

        Raises:
            GroupBroken: the group has ended.
        """
        return self._transfer(values, lambda backend: backend.send([values], rank, 0))

    def begin_receive(self, values: Tensor, rank: int) -> Transfer:
        """Start receiving a tensor of the same dtype and shape from another member into `values`.

        Raises:
            GroupBroken: the group has ended.
        """
        return self._transfer(values, lambda backend: backend.recv([values], rank, 0))

    def _transfer(self, values: Tensor, launch: Callable[[Backend], Work]) -> Transfer:
        assert self._tensors is not None, "nobody else is in the group"
        with self._launching():
            return Transfer(self, launch(self._tensors.backend), values)

    def _in_place(self, values: Tensor, launch: Callable[[Backend], Work]) -> Tensor:
        if self._tensors is None:
            self._check()
            return values
        with self._launching():
            work = launch(self._tensors.backend)
        self.finish(work, watched=self._tensors.is_watched)
        return values

    def finish(self, work: Work, *, watched: bool = True) -> None:
        """Wait for a collective.

        Args:
            watched: also fail when any member has left; NCCL detects that itself.

        Raises:
            GroupBroken: it failed; the group has been aborted.
        """
        while watched and not self.wait_for(work, _POLL_INTERVAL):
            pass
        try:
            if watched and self.is_over and not work.is_completed():
                # Disconnecting fails it, unless it was started at the wrong moment.
                work.wait(timedelta(seconds=_GRACE))
            else:
                work.wait()
        except RuntimeError as error:
            if not work.is_completed():
                self._stuck.append(work)
            raise self._broken(first_line(error)) from error

    def wait_for(self, work: Work, seconds: float) -> bool:
        """Wait up to `seconds` for a collective to succeed or fail; return whether it has.

        Aborts the group if a member has left and the collective does not complete soon after: a
        member that left in order has sent all of its data, which may still be in transit.
        """
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if work.is_completed() or self.is_over:
                return True
        else:
            return True
        departed_at = self._departed_at  # another thread may be waiting for a step
        if not any(connections.has_departed() for connections in self._all):
            self._departed_at = None
        elif departed_at is None:
            self._departed_at = time.monotonic()
        elif time.monotonic() - departed_at > _GRACE:
            self.abort()
        return False

    def abort(self) -> None:
        """Abort the group; callable from any thread. Pending operations fail on all ranks."""
        self._is_over.set()
        for connections in self._all:
            connections.disconnect()

    def close(self) -> None:
        """Free sockets and threads; call `abort` first if operations are in flight. Idempotent.

        Peers' current and later collectives raise GroupBroken.
        """
        self.abort()
        stuck, self._stuck = [work for work in self._stuck if not work.is_completed()], []
        for connections in self._all:
            connections.close(stuck)

    @contextlib.contextmanager
    def _launching(self) -> Iterator[None]:
        self._check()
        try:
            yield
        except RuntimeError as error:  # gloo has no exception type for a departed peer
            raise self._broken(first_line(error)) from error

    def _check(self) -> None:
        if self._is_over.is_set():
            raise GroupBroken(f"rank {self.rank}: the group of topology {self.topology} has ended")

    def _broken(self, reason: str) -> GroupBroken:
        self.abort()
        return GroupBroken(f"rank {self.rank} lost the group of topology {self.topology}: {reason}")


class Bundle:
    """Several groups of one process that end together."""

    def __init__(self, *groups: Group | None) -> None:
        """Take ownership of the groups, in the order in which to end them; None is skipped."""
        self._groups = [group for group in groups if group is not None]

    def abort(self) -> None:
        """Abort all groups; callable from any thread. Pending operations fail on all ranks."""
        for group in self._groups:
            group.abort()

    def close(self) -> None:
        """Free sockets and threads; abort operations in flight first. Idempotent."""
        for group in self._groups:
            group.close()


def join_group(
    spec: GroupSpec, device: torch.device = CPU, listener: socket.socket | None = None
) -> Group:
    """Rendezvous with all members and connect to them.

    Args:
        device: device of the tensors of steps; integers are always exchanged between CPUs.
        listener: at rank 0, the result of `open_listener` for the spec's address; ownership is
            transferred.

    Raises:
        GroupBroken: not all joined within the timeout, or the network failed.
    """
    if spec.size == 1:
        if listener is not None:
            listener.close()
        return Group(spec, None, None)
    try:
        store = open_store(spec, listener)
        return connect(store, spec, "", device)
    except (RuntimeError, OSError, GroupBroken) as error:
        raise could_not_join(spec, error) from error


def connect(store: Store, spec: GroupSpec, name: str, device: torch.device) -> Group:
    """Connect to all members of one of the groups that share a store.

    Args:
        spec: this process's rank in the group, which has at least two members.
        name: distinguishes the group from others at the same store.

    Raises:
        RuntimeError, OSError, GroupBroken: not all joined, or the network failed.
    """
    made: list[Connections] = []
    try:
        made.append(Connections(store, f"{name}rows", spec, CPU))
        made.append(Connections(store, f"{name}tensors", spec, device))
        if device.type != "cpu":
            made.append(Connections(store, f"{name}counts", spec, CPU))
        group = Group(spec, *made)
        group.all_gather_rows([spec.topology]).wait()
        group.all_gather_counts(spec.rank)
    except BaseException:
        for connections in made:
            connections.disconnect()
            connections.close()
        raise
    return group


def could_not_join(spec: GroupSpec, error: Exception) -> GroupBroken:
    """Return the exception for a failed join."""
    return GroupBroken(
        f"rank {spec.rank} of {spec.size} could not join the group of topology "
        f"{spec.topology} at {spec.address}: {first_line(error)}"
    )
