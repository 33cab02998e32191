"""File descriptor limits, raised before the first connection."""

import fcntl
import logging
import os
import resource

from engine.shared.process_state import raise_descriptor_limit

logger = logging.getLogger(__name__)

_DESCRIPTORS = 8192
_OTHERS = 256
"""Descriptors reserved for engines, files and threads."""


def grow_descriptor_table() -> None:
    """Raise this process's descriptor limit to its maximum, and allocate the table at once.

    The kernel grows the descriptor table at 64, 128, 256 open descriptors and so on. In a process
    with threads each growth waits for an RCU grace period, which blocks the event loop.
    """
    raise_descriptor_limit()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = _DESCRIPTORS if limit == resource.RLIM_INFINITY else min(_DESCRIPTORS, limit)
    own = os.open(os.devnull, os.O_RDONLY)
    try:
        # The table never shrinks, so the highest descriptor can be closed again.
        os.close(fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, highest - 1))
    except OSError as error:  # already in use by an inherited descriptor
        logger.debug("cannot open descriptor %d: %s", highest - 1, error)
    finally:
        os.close(own)


def room_for_connections(requested: int) -> int:
    """Return the requested number of connections, or fewer if the descriptor limit is low."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(limit - _OTHERS, limit // 2)
    if limit == resource.RLIM_INFINITY or requested <= room:
        return requested
    logger.warning(
        "only %d connections instead of --max-connections %d: the limit of open files is %d "
        "(raise it with `ulimit -Hn` or LimitNOFILE=)", room, requested, limit,
    )  # fmt: skip
    return room
