"""Checks how little CPU time the processes of a stack use while it is idle."""

import time

from benchmarks.running_stack import RunningStack
from tests.support.waiting import until

SECONDS = 5.0
"""Duration of a measurement: longer than the timer intervals of idle processes."""


def until_idle(stack: RunningStack, most: float) -> None:
    """Wait until all processes together use less than a fraction of a core over a measurement.

    Cleanup after the last request happens once, so a later measurement does not see it; polling
    shows in every one.

    Args:
        most: maximum CPU seconds per second, e.g. 0.02.
    """

    def is_idle() -> bool:
        before, began = stack.cpu_seconds(), time.monotonic()
        time.sleep(SECONDS)
        used = stack.cpu_seconds() - before
        return used < most * (time.monotonic() - began)

    until(is_idle, f"the stack uses less than {most:.0%} of a core")
