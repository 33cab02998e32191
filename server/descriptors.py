"""Room for many connections, before the first one comes."""

import fcntl
import logging
import os
import resource

logger = logging.getLogger(__name__)

_DESCRIPTORS = 8192


def make_room_for_descriptors() -> None:
    """Have the kernel enlarge this process's table of descriptors once and for all.

    The table grows by itself at 64, 128, 256 and so on open connections, but where a process has
    threads the kernel waits for all processors each time, and the event loop stands still.
    """
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
