"""Bounds on the CPU time of a piece of work, on machines that do other work too.

What else runs only ever adds to a measurement: the least of several counts, and the first that is
short enough ends them.
"""

import math
import time
from collections.abc import Callable

import pytest

ATTEMPTS = 30
MAX_TOTAL = 60.0
"""CPU seconds after which nothing is measured again."""
MAX_GROWTH = 3.0
"""Maximum growth of the time when the input doubles; 4 would be quadratic."""

Work = Callable[[], object]


def cpu_seconds(work: Work) -> float:
    """Return the CPU seconds that this process spends on a piece of work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def takes_less_than(most: float, work: Work) -> None:
    """Fail if a piece of work takes as many CPU seconds each time."""
    least, total = math.inf, 0.0
    for _ in range(ATTEMPTS):
        spent = cpu_seconds(work)
        least, total = min(least, spent), total + spent
        if least < most:
            return
        if total > MAX_TOTAL:
            break
    pytest.fail(f"took {least:.3f} s of a processor, not less than {most} s")


def grows_no_faster_than_input(half: Work, whole: Work, most: float = math.inf) -> None:
    """Fail if work on the whole of an input takes over `MAX_GROWTH` times as long as on half of it.

    Args:
        most: CPU seconds that the whole may take at most.
    """
    once = twice = math.inf
    for _ in range(ATTEMPTS):
        once, twice = min(once, cpu_seconds(half)), min(twice, cpu_seconds(whole))
        if twice < min(MAX_GROWTH * once, most):
            return
    pytest.fail(f"half takes {once:.3f} s, the whole {twice:.3f} s of a processor")
