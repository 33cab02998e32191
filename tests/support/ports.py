"""Ports of this host on which nobody listens, and which no other tests get meanwhile."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

LOWEST, HIGHEST = 10_000, 32_000
"""They lie below those that the kernel gives to connections, none of which can take one before
the process that it was meant for does."""

_reserved: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Return so many free ports in a row, which are this process's until it ends."""
    for first in _candidates():
        ports = range(first, first + count)
        if _reserved.isdisjoint(ports) and _are_free(ports) and _reserve(first, count):
            return list(ports)
    raise AssertionError("no ports are free")


def free_port() -> int:
    """Return one free port."""
    return free_ports(1)[0]


def port_of_a_coordinator() -> int:
    """Return the first of five free ports in a row: a coordinator's four and its probes'."""
    return free_ports(5)[0]


def _candidates() -> Iterator[int]:
    """Return where to look, from a place of this process's own on."""
    own = LOWEST + 40 * os.getpid() % (HIGHEST - LOWEST)
    yield from range(max(own, *_reserved, 0) + 1, HIGHEST)
    yield from range(LOWEST, HIGHEST)


def _are_free(ports: range) -> bool:
    try:
        with ExitStack() as held:
            for port in ports:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
    except OSError:
        return False
    return True


def _reserve(first: int, count: int) -> bool:
    """Lock as many bytes of a file that all processes of tests share, from that offset on."""
    try:
        fcntl.lockf(_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first)
    except OSError:
        return False
    _reserved.update(range(first, first + count))
    return True


_locks = os.open(
    Path(tempfile.gettempdir()) / f"ports-of-swell-tests-{os.getuid()}",
    os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
    0o600,
)
"""Open as long as this process lives: the kernel takes its locks back when it ends."""
