"""Bounds on the CPU time of a piece of work, on machines that do other work too.

What else runs only ever adds to a measurement: the least of several counts, and the first that is
short enough ends them. Other work comes and goes, so there is a pause before each further one.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator

import pytest

ATTEMPTS = 30
"""So often something is measured at least before it is called slow."""
MAX_TOTAL = 60.0
"""CPU seconds after which nothing is measured again."""
PATIENCE = 30.0
"""Seconds after which nothing is measured again that was often enough."""
LONGEST_PAUSE = 0.5
"""Seconds before another measurement: what made one slow may be over then."""
MAX_GROWTH = 3.0
"""Maximum growth of the time when the input doubles; 4 would be quadratic."""

Work = Callable[[], object]


def cpu_seconds(work: Work) -> float:
    """Return the CPU seconds that this process spends on a piece of work.

    No garbage is collected meanwhile: that would cost what all other tests have left behind.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        began = time.process_time()
        work()
        return time.process_time() - began
    finally:
        if was_enabled:
            gc.enable()


def takes_less_than(most: float, work: Work) -> None:
    """Fail if a piece of work takes as many CPU seconds each time."""
    least = math.inf
    for _ in _attempts():
        least = min(least, cpu_seconds(work))
        if least < most:
            return
    pytest.fail(f"took {least:.3f} s of a processor, not less than {most} s")


def grows_no_faster_than_input(half: Work, whole: Work, most: float = math.inf) -> None:
    """Fail if work on the whole of an input takes over `MAX_GROWTH` times as long as on half of it.

    Args:
        most: CPU seconds that the whole may take at most.
    """
    once = twice = math.inf
    for _ in _attempts():
        once, twice = min(once, cpu_seconds(half)), min(twice, cpu_seconds(whole))
        if twice < min(MAX_GROWTH * once, most):
            return
    pytest.fail(f"half takes {once:.3f} s, the whole {twice:.3f} s of a processor")


def _attempts() -> Iterator[None]:
    """Yield until it has been tried often and for long, with pauses that grow."""
    began, spent = time.monotonic(), time.process_time()
    number = 0
    while time.process_time() - spent < MAX_TOTAL:
        if number >= ATTEMPTS and time.monotonic() - began > PATIENCE:
            return
        time.sleep(min(0.01 * number, LONGEST_PAUSE))
        yield
        number += 1
