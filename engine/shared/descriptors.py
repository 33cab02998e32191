"""File descriptors: as many as the system allows, and a warning before there are none left."""

import logging
import os
import resource
from typing import NamedTuple

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
        return (
            None
            if limit == resource.RLIM_INFINITY
            else Descriptors(len(os.listdir("/proc/self/fd")) - 1, limit)
        )
    except OSError:
        return None


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
