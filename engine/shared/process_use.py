"""What this process takes of its machine, as Linux counts it."""

import os
import time
from functools import cache
from pathlib import Path

from engine.shared.descriptors import Descriptors, descriptors
from engine.shared.messages import ProcessUse


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
