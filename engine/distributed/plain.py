"""A group that anybody can join with torch alone, such as one with a trainer outside the stack.

The members meet at a TCP store under the prefix `tcp://HOST:PORT`, which is where vLLM's stateless
groups of torch.distributed meet, too. Nothing that comes through it is unpickled.
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
"""Where in its sources gloo found something wrong, and what it guesses."""
_LOOK = 0.2
_SLICE = timedelta(seconds=_LOOK)
"""How long a wait lasts before it is looked whether anybody still waits."""
_DEVICE_LOOK = 0.001
_NCCL_MARGIN = 600.0
"""Seconds that NCCL waits longer than we do: when its own wait ends it ends the process."""


class PlainGroup:
    """One process's end; made by `join_plain_group`."""

    def __init__(self, spec: GroupSpec, store: object, made: Backend, is_nccl: bool) -> None:
        self._timeout = spec.timeout_s
        self._store = store  # which the first rank hosts as long as this lives
        self._backend = made
        self._is_nccl = is_nccl

    def broadcast(self, values: Tensor, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Replace the values, in place, by those of rank 0; at rank 0, send them.

        Raises:
            GroupBroken: a member has left, it took longer than the timeout, or it is not wanted
                any more. The group is of no use then.
        """
        until = time.monotonic() + self._timeout
        try:
            work = self._backend.broadcast([values])
            while not self._is_over(work):
                if not is_wanted():
                    raise GroupBroken("it was given up")
                if time.monotonic() > until:
                    raise GroupBroken(f"nothing came for {self._timeout:g} s")
            work.wait()
        except RuntimeError as error:
            raise GroupBroken(_AROUND.sub("", first_line(error))) from error
        except GroupBroken:
            if self._is_nccl:
                self._backend.abort()
            raise

    def _is_over(self, work: torch.distributed.Work) -> bool:
        if self._is_nccl:
            time.sleep(_DEVICE_LOOK)
        else:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                return work.is_completed()  # then `wait` says what is wrong
            return True
        return work.is_completed()


def join_plain_group(
    spec: GroupSpec, device: torch.device, listener: socket.socket | None = None
) -> PlainGroup:
    """Meet all members: over gloo, or NCCL if their tensors are on CUDA devices.

    Args:
        listener: at rank 0, what `open_listener` returned for the spec's address; taken over.

    Raises:
        GroupBroken: not everybody came within the timeout, or the network fails.
    """
    is_nccl = device.type == "cuda"
    try:
        if spec.rank:
            _wait_for_store(spec)
        store = backend.open_store(spec, listener)
        scope = PrefixStore(f"tcp://{spec.address}", store)
        if is_nccl:
            patient = replace(spec, timeout_s=spec.timeout_s + _NCCL_MARGIN)
            return PlainGroup(spec, store, backend.nccl_backend(scope, patient, device), is_nccl)
        return PlainGroup(spec, store, backend.gloo_backend(scope, spec), is_nccl)
    except (RuntimeError, OSError) as error:
        raise GroupBroken(
            f"rank {spec.rank} of {spec.size} met nobody, or not all, at {spec.address} within "
            f"{spec.timeout_s:g} s: {first_line(error)}"
        ) from error


def _wait_for_store(spec: GroupSpec) -> None:
    """Wait until rank 0 listens: torch would write a stack of native frames while it does not.

    Raises:
        OSError: it does not.
    """
    until = time.monotonic() + spec.timeout_s
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection((spec.host, spec.port), timeout=max(left, _LOOK)).close()
        except OSError:
            if left < _LOOK:
                raise
            time.sleep(_LOOK)
        else:
            return
