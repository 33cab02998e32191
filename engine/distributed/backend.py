"""One set of connections between all members: torch's process group without its global registry.

torch.distributed keeps one default group for the lifetime of a process. Groups here are plain
objects that can be created, dropped and created again with other members.
"""

import contextlib
import os
import select
import socket
import stat
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from engine.distributed.spec import GroupBroken, GroupSpec, open_listener
from engine.shared.addresses import address_towards

_NAME = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")


def use_batch_scheduling() -> None:
    """Prevent this process's gloo threads from preempting the threads that they wait for.

    A gloo thread that is woken by data for a connection polls the kernel while another thread holds
    that connection's lock. If it has preempted that very thread, it polls for its whole time slice:
    an exchange of a third of a millisecond then takes several. With `SCHED_BATCH` it does not
    preempt on wake-up; it still gets its share of the core, and starts immediately on an idle one.

    Skips threads whose policy was changed before; does nothing outside Linux.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # the thread has exited, or this is not permitted
            is_ordinary = os.sched_getscheduler(int(thread.name)) == os.SCHED_OTHER
            if is_ordinary and (thread / "comm").read_text().strip() == _NAME:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


_HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)
_SECOND = timedelta(seconds=1)


class Backend(Protocol):
    """The part of torch's process groups that is used; each call starts one collective."""

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work: ...

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Work: ...

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def broadcast(self, tensors: list[Tensor]) -> Work: ...

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


_abandoned: list[tuple[Backend | None, Sequence[Work]]] = []
"""Process groups that were closed with unfinished collectives, which keep them alive."""


def open_store(spec: GroupSpec, listener: socket.socket | None) -> Store:
    """Return the rendezvous store; rank 0 hosts it, on `listener` if given.

    Raises:
        GroupBroken: the store is unreachable, or cannot be hosted.
    """
    try:
        if spec.rank:
            return TCPStore(spec.host, spec.port, timeout=spec.timeout_s * _SECOND)
        server = listener or open_listener(spec.host, spec.port)
        return TCPStore(
            spec.host,
            spec.port,
            is_master=True,
            wait_for_workers=False,
            timeout=spec.timeout_s * _SECOND,
            master_listen_fd=server.detach(),
        )
    except (RuntimeError, OSError) as error:
        raise GroupBroken(f"no rendezvous at {spec.address}: {first_line(error)}") from error


class Connections:
    """A process group that can be disconnected: gloo, or NCCL for tensors on CUDA devices."""

    _making = threading.Lock()
    """Held while a group is created, so that the sockets opened meanwhile are the group's."""

    def __init__(self, store: Store, name: str, spec: GroupSpec, device: torch.device) -> None:
        """Connect to all members, which must join within the timeout.

        Raises:
            RuntimeError: not all joined, or the network failed.
        """
        self._device = device
        self._backend: Backend | None = None
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        scope = PrefixStore(f"{spec.topology}/{name}", store)
        if device.type == "cuda":
            self._backend = nccl_backend(scope, spec, device)
            return
        with self._making:
            before = _tcp_connections()
            self._backend = gloo_backend(scope, spec)
            after = _tcp_connections()
        self._keep_sockets(
            scope, spec, {fd: ends for fd, ends in after.items() if before.get(fd) != ends}
        )

    @property
    def backend(self) -> Backend:
        """The process group.

        Raises:
            GroupBroken: it was closed.
        """
        if self._backend is None:
            raise GroupBroken("the group was closed")
        return self._backend

    @property
    def is_watched(self) -> bool:
        """Whether `has_departed` can detect departed peers."""
        return self._device.type != "cuda"

    def disconnect(self) -> None:
        """Shut down all connections: pending operations here and at peers fail immediately.

        Gloo has no such function: without this, its waits end only when they time out.
        """
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):  # the peer closed it first
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            self._sockets.clear()
        if self._backend is not None and self._device.type == "cuda":
            self._backend.abort()

    def has_departed(self) -> bool:
        """Return whether a peer has closed its connection."""
        poller = select.poll()
        with self._lock:
            for connection in self._sockets:
                poller.register(connection, _HANGUP)
            return bool(poller.poll(0))

    def close(self, stuck: Sequence[Work] = ()) -> None:
        """Free the connections and their threads.

        With `stuck`, unfinished collectives, this would block until their timeouts: instead, a
        later `close` frees the group once they have completed.
        """
        _abandoned[:] = [
            (backend, works)
            for backend, works in _abandoned
            if not all(work.is_completed() for work in works)
        ]
        if stuck:
            _abandoned.append((self._backend, stuck))
        self._backend = None

    def _keep_sockets(self, store: Store, spec: GroupSpec, fresh: dict[int, "_Endpoints"]) -> None:
        """Duplicate the new sockets that are connected to other members."""
        mirrored = [_Endpoints(ends.remote, ends.local) for ends in fresh.values()]
        store.set(f"sockets/{spec.rank}", msgspec.json.encode(mirrored).decode())
        remote_ends: set[_Endpoints] = set()
        for rank in range(spec.size):
            if rank != spec.rank:
                received = store.get(f"sockets/{rank}")
                remote_ends.update(msgspec.json.decode(received, type=list[_Endpoints]))
        for fd, ends in fresh.items():
            if ends in remote_ends:
                self._sockets.append(socket.socket(fileno=os.dup(fd)))


def gloo_backend(store: Store, spec: GroupSpec) -> Backend:
    gloo: Any = ProcessGroupGloo  # torch's stubs are incomplete
    options = gloo._Options()
    host = spec.host if spec.rank == 0 else address_towards(spec.host, spec.port)
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = spec.timeout_s * _SECOND
    options._threads = 1
    backend = cast("Backend", gloo(store, spec.rank, spec.size, options))
    use_batch_scheduling()
    return backend


def nccl_backend(store: Store, spec: GroupSpec, device: torch.device) -> Backend:
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = spec.timeout_s * _SECOND
    backend = nccl(store, spec.rank, spec.size, options)
    backend.eager_connect_single_device(device)
    return cast("Backend", backend)


class _Endpoints(msgspec.Struct, frozen=True):
    """The two addresses of a TCP connection."""

    local: tuple[str, int]
    remote: tuple[str, int]


def _tcp_connections() -> dict[int, _Endpoints]:
    """Return this process's connected TCP sockets by descriptor."""
    found: dict[int, _Endpoints] = {}
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime, or not connected
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as probe:
                if probe.family in (socket.AF_INET, socket.AF_INET6):
                    local, remote = probe.getsockname()[:2], probe.getpeername()[:2]
                    found[int(name)] = _Endpoints(local, remote)
    return found


def first_line(error: Exception) -> str:
    """Return the first line of a torch exception, without its native stack trace."""
    return str(error).split("\n", 1)[0] or type(error).__name__
