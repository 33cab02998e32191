"""Bounds on the CPU time of a piece of work, on machines with other load.

Other load only ever adds to a measurement, so the minimum of several counts, and the first one
below the bound ends the measurement. Since load varies, pauses precede repetitions.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator

import pytest

ATTEMPTS = 30
"""Minimum number of attempts before work is considered slow."""
MAX_TOTAL = 60.0
"""CPU seconds after which no attempt is made."""
PATIENCE = 30.0
"""Seconds after which no attempt beyond `ATTEMPTS` is made."""
LONGEST_PAUSE = 0.5
"""Maximum seconds between attempts, to let other load pass."""
MAX_GROWTH = 3.0
"""Maximum growth of the time when the input doubles; 4 would be quadratic."""

Work = Callable[[], object]


def cpu_seconds(work: Work) -> float:
    """Return the CPU seconds that this process spends on a piece of work.

    Garbage collection is disabled meanwhile, since it would depend on all other tests.
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
    """Fail if every attempt takes at least `most` CPU seconds."""
    least = math.inf
    for _ in _attempts():
        least = min(least, cpu_seconds(work))
        if least < most:
            return
    pytest.fail(f"took {least:.3f} s of a processor, not less than {most} s")


def grows_no_faster_than_input(half: Work, whole: Work, most: float = math.inf) -> None:
    """Fail if the time of work on a whole input exceeds `MAX_GROWTH` times that on half of it.

    Args:
        most: maximum CPU seconds for the whole.
    """
    once = twice = math.inf
    for _ in _attempts():
        once, twice = min(once, cpu_seconds(half)), min(twice, cpu_seconds(whole))
        if twice < min(MAX_GROWTH * once, most):
            return
    pytest.fail(f"half takes {once:.3f} s, the whole {twice:.3f} s of a processor")


def _attempts() -> Iterator[None]:
    """Yield for each attempt, with growing pauses, until the limits are reached."""
    began, spent = time.monotonic(), time.process_time()
    number = 0
    while time.process_time() - spent < MAX_TOTAL:
        if number >= ATTEMPTS and time.monotonic() - began > PATIENCE:
            return
        time.sleep(min(0.01 * number, LONGEST_PAUSE))
        yield
        number += 1
