"""Free ports of this host, reserved against other tests."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

LOWEST, HIGHEST = 10_000, 32_000
"""Below the kernel's ephemeral range, so that no outgoing connection can take a port before its
process does."""

_reserved: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Return `count` consecutive free ports, reserved until this process exits."""
    for first in _candidates():
        ports = range(first, first + count)
        if _reserved.isdisjoint(ports) and _are_free(ports) and _reserve(first, count):
            return list(ports)
    raise AssertionError("no ports are free")


def free_port() -> int:
    """Return one free port."""
    return free_ports(1)[0]


def port_of_a_coordinator() -> int:
    """Return the first of five consecutive free ports: a coordinator's four, and its probes'."""
    return free_ports(5)[0]


def _candidates() -> Iterator[int]:
    """Yield candidate ports, starting at a process-specific one."""
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
    """Lock a range of bytes, at the ports' offsets, of a file shared by all test processes."""
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
"""Open until this process exits, when the kernel releases its locks."""
