"""Room for many connections, before the first one comes."""

import fcntl
import logging
import os
import resource

logger = logging.getLogger(__name__)

_DESCRIPTORS = 8192
_OTHERS = 256
"""Descriptors for what is no connection of a client: engines, files, threads."""


def make_room_for_descriptors() -> None:
    """Allow this process as many descriptors as it may have, and make room for them at once.

    The soft limit is usually 1,024 for the sake of programs that use `select`, far below the hard
    one. The kernel's table of descriptors grows by itself at 64, 128, 256 and so on open ones, but
    where a process has threads the kernel waits for all processors each time, and the event loop
    stands still.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            limit = hard
        except (OSError, ValueError) as error:  # the hard limit is above what the kernel allows
            logger.debug("the limit of descriptors stays at %d: %s", limit, error)
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
    if limit == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, limit - _OTHERS))
