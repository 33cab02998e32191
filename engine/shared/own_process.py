"""A process's own signals, heap, descriptors and use of its machine."""

import gc
import logging
import os
import resource
import signal
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from engine.shared.messages import ProcessUse

logger = logging.getLogger(__name__)

NEARLY = 0.8
"""Share of the descriptors from which a process warns."""

LOOK_INTERVAL = 1.0
"""Seconds between two counts."""


class Descriptors(NamedTuple):
    """How many a process has open, and how many it may have."""

    open: int
    limit: int

    @property
    def are_scarce(self) -> bool:
        """Whether a process should say that there are few left."""
        return self.open > NEARLY * self.limit


def raise_descriptor_limit() -> None:
    """Allow this process, and those that it starts, as many descriptors as the hard limit says.

    The soft limit is usually 1,024 for the sake of programs that use `select`.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # the hard limit is above what the kernel allows
            logger.debug("the limit of descriptors stays at %d: %s", limit, error)


def descriptors() -> Descriptors | None:
    """Count the descriptors of this process; None where there is no limit, or no way to count."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        count = len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return None
    return None if limit == resource.RLIM_INFINITY else Descriptors(count, limit)


class DescriptorWatch:
    """Counts descriptors now and then, and warns when most of them are taken."""

    def __init__(self) -> None:
        self.newest: Descriptors | None = None
        self._look_at = float("-inf")
        self._warned = False

    def look(self, now: float) -> bool:
        """Count, unless that was done just before; return whether it was done now."""
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_INTERVAL
        self.newest = descriptors()
        scarce = self.newest is not None and self.newest.are_scarce
        if scarce and not self._warned and self.newest is not None:
            logger.warning(
                "%d of %d file descriptors are open: raise the hard limit (ulimit -Hn, "
                "LimitNOFILE= of systemd, --ulimit nofile= of docker)", *self.newest,
            )  # fmt: skip
        self._warned = scarce
        return True


def process_use(counted: Descriptors | None = None) -> ProcessUse:
    """Return what this process takes now; what the system does not tell is 0.

    Args:
        counted: the descriptors, if they have just been counted.
    """
    opened, limit = counted or descriptors() or (0, 0)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        pages = 0
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    return ProcessUse(time.process_time(), memory, opened, limit, _started())


@cache
def _started() -> float:
    """Return when this process began, as Unix time; 0 where that is not known."""
    try:
        # The name of the program comes first, in parentheses, and may have spaces in it.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return int(Path("/proc/stat").read_text().split("btime ")[1].split()[0]) + since_boot
    except (OSError, ValueError, IndexError):
        return 0.0


def settle_heap() -> None:
    """Exempt all objects that exist now from collections; to be called once a process has started.

    The libraries alone make some 200,000 objects, and to look through them takes about 0.1 s,
    during which nothing moves. They live as long as the process, so nothing would be found.
    """
    gc.collect()
    gc.freeze()


def end_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT and, unless `nohup` has it ignored, SIGHUP of a closing terminal."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP
