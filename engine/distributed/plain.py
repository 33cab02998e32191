"""A group that needs only torch to join, e.g. with a trainer outside the stack.

The members meet at a TCP store under the prefix `tcp://HOST:PORT`, like vLLM's stateless groups of
torch.distributed. Nothing received through it is unpickled.
"""

import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from msgspec.structs import replace
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from engine.distributed import backend
from engine.distributed.backend import Backend, first_line
from engine.distributed.spec import GroupBroken, GroupSpec

_AROUND = re.compile(r"^\[[^ ]*\] |\. This is typically .*")
"""Gloo's source location, and its guess at the cause, in error messages."""
_POLL_SECONDS = 0.2
_SLICE = timedelta(seconds=_POLL_SECONDS)
"""Timeout of one wait, between checks whether the collective is still wanted."""
_DEVICE_POLL_SECONDS = 0.001
_NCCL_MARGIN = 600.0
"""Seconds that NCCL's timeout exceeds ours: when it expires, NCCL ends the process."""


class PlainGroup:
    """One process's end of the group; created by `join_plain_group`."""

    def __init__(
        self, spec: GroupSpec, store: object, process_group: Backend, is_nccl: bool
    ) -> None:
        self._timeout = spec.timeout_s
        self._store = store  # keeps it alive: rank 0 hosts it
        self._backend = process_group
        self._is_nccl = is_nccl

    def broadcast(self, values: Tensor, is_current: Callable[[], bool] = lambda: True) -> None:
        """Replace the values, in place, by those of rank 0; at rank 0, send them.

        Raises:
            GroupBroken: a member has left, the timeout expired, or `is_current` returned False. The
                group is unusable afterwards.
        """
        deadline = time.monotonic() + self._timeout
        try:
            work = self._backend.broadcast([values])
            while not self._is_over(work):
                if not is_current():
                    raise GroupBroken("it was cancelled")
                if time.monotonic() > deadline:
                    raise GroupBroken(f"nothing arrived for {self._timeout:g} s")
            work.wait()
        except RuntimeError as error:
            raise GroupBroken(_AROUND.sub("", first_line(error))) from error
        except GroupBroken:
            if self._is_nccl:
                self._backend.abort()
            raise

    def _is_over(self, work: torch.distributed.Work) -> bool:
        if self._is_nccl:
            time.sleep(_DEVICE_POLL_SECONDS)
        else:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                return work.is_completed()  # then `wait` raises its error
            return True
        return work.is_completed()


def join_plain_group(
    spec: GroupSpec, device: torch.device, listener: socket.socket | None = None
) -> PlainGroup:
    """Rendezvous with all members: over gloo, or NCCL for tensors on CUDA devices.

    Args:
        listener: at rank 0, the result of `open_listener` for the spec's address; ownership is
            transferred.

    Raises:
        GroupBroken: not all joined within the timeout, or the network failed.
    """
    is_nccl = device.type == "cuda"
    try:
        if spec.rank:
            _wait_for_store(spec)
        store = backend.open_store(spec, listener)
        scope = PrefixStore(f"tcp://{spec.address}", store)
        if is_nccl:
            longer_spec = replace(spec, timeout_s=spec.timeout_s + _NCCL_MARGIN)
            return PlainGroup(
                spec, store, backend.nccl_backend(scope, longer_spec, device), is_nccl
            )
        return PlainGroup(spec, store, backend.gloo_backend(scope, spec), is_nccl)
    except (RuntimeError, OSError) as error:
        raise GroupBroken(
            f"rank {spec.rank} of {spec.size} met nobody, or not all, at {spec.address} within "
            f"{spec.timeout_s:g} s: {first_line(error)}"
        ) from error


def _wait_for_store(spec: GroupSpec) -> None:
    """Wait until rank 0 listens; otherwise torch prints a native stack trace.

    Raises:
        OSError: it does not listen within the timeout.
    """
    deadline = time.monotonic() + spec.timeout_s
    while True:
        remaining = deadline - time.monotonic()
        try:
            socket.create_connection(
                (spec.host, spec.port), timeout=max(remaining, _POLL_SECONDS)
            ).close()
        except OSError:
            if remaining < _POLL_SECONDS:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return
