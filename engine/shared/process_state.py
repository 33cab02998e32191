"""A process's own signals, heap, descriptors and resource usage."""

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
"""Share of the descriptor limit above which a process warns."""

REFRESH_INTERVAL = 1.0
"""Seconds between two counts."""


class Descriptors(NamedTuple):
    """Number of open descriptors of a process, and its limit."""

    open: int
    limit: int


def raise_descriptor_limit() -> None:
    """Raise the descriptor limit of this process and its children to the hard limit.

    The soft limit is usually 1,024, for programs that use `select`.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # the hard limit is above what the kernel allows
            logger.debug("the limit of descriptors stays at %d: %s", limit, error)


def descriptors() -> Descriptors | None:
    """Count this process's descriptors; None if there is no limit, or no way to count."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        count = len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return None
    return None if limit == resource.RLIM_INFINITY else Descriptors(count, limit)


class DescriptorWatch:
    """Counts descriptors periodically, and warns when most of the limit is used."""

    def __init__(self) -> None:
        self.newest: Descriptors | None = None
        self._refresh_at = float("-inf")
        self._warned = False

    def refresh(self, now: float) -> bool:
        """Count, at most once per interval; return whether it counted."""
        if now < self._refresh_at:
            return False
        self._refresh_at = now + REFRESH_INTERVAL
        self.newest = descriptors()
        scarce = self.newest is not None and self.newest.open > NEARLY * self.newest.limit
        if scarce and not self._warned and self.newest is not None:
            logger.warning(
                "%d of %d file descriptors are open: raise the hard limit (ulimit -Hn, "
                "LimitNOFILE= of systemd, --ulimit nofile= of docker)", *self.newest,
            )  # fmt: skip
        self._warned = scarce
        return True


def process_use(counted: Descriptors | None = None) -> ProcessUse:
    """Return this process's current resource usage; 0 for unavailable values.

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
    """Return the process's start as Unix time; 0 if unknown."""
    try:
        # The program name in parentheses precedes the fields, and can contain spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return int(Path("/proc/stat").read_text().split("btime ")[1].split()[0]) + since_boot
    except (OSError, ValueError, IndexError):
        return 0.0


def freeze_heap() -> None:
    """Exempt all current objects from garbage collection; call once a process has started.

    The libraries alone create some 200,000 objects, which take about 0.1 s to scan while the
    process stalls. They live as long as the process, so a scan would find nothing.
    """
    gc.collect()
    gc.freeze()


def end_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT and SIGHUP (terminal closed), the latter unless `nohup` ignores it."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP
