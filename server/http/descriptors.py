"""Room for many connections, before the first one comes."""

import fcntl
import logging
import os
import resource

from engine.shared.own_process import raise_descriptor_limit

logger = logging.getLogger(__name__)

_DESCRIPTORS = 8192
_OTHERS = 256
"""Descriptors for what is no connection of a client: engines, files, threads."""


def make_room_for_descriptors() -> None:
    """Raise this process's limit of descriptors to its maximum, and allocate their table at once.

    The kernel's table of descriptors grows by itself at 64, 128, 256 and so on open ones, but
    where a process has threads the kernel waits for all processors each time, and the event loop
    stands still.
    """
    raise_descriptor_limit()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if limit == resource.RLIM_INFINITY else min(_DESCRIPTORS, limit)
    own = os.open(os.devnull, os.O_RDONLY)
    try:
        # The table never shrinks, so a high number may be given back at once.
        os.close(fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, most - 1))
    except OSError as error:  # taken by something that was inherited
        logger.debug("no descriptor %d: %s", most - 1, error)
    finally:
        os.close(own)


def room_for_connections(wanted: int) -> int:
    """Return how many of the wanted connections this process has descriptors for."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(limit - _OTHERS, limit // 2)
    if limit == resource.RLIM_INFINITY or wanted <= room:
        return wanted
    logger.warning(
        "only %d connections at a time, not --max-connections %d: the limit of open files is %d "
        "(raise it with `ulimit -Hn` or LimitNOFILE=)", room, wanted, limit,
    )  # fmt: skip
    return room
