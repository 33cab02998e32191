"""How little the processes of a stack do while nobody asks them for anything."""

import time

from benchmarks.running_stack import RunningStack
from tests.support.waiting import until

SECONDS = 5.0
"""Of one look: longer than the intervals at which idle processes do anything."""


def until_idle(stack: RunningStack, most: float) -> None:
    """Wait until all processes together have used less than a share of a core for a while.

    What has still to be tidied up after the last request is done once, and a later look does not
    see it; what polls does so in every look.

    Args:
        most: CPU seconds per second, e.g. 0.02.
    """

    def is_idle() -> bool:
        before, began = stack.cpu_seconds(), time.monotonic()
        time.sleep(SECONDS)
        used = stack.cpu_seconds() - before
        return used < most * (time.monotonic() - began)

    until(is_idle, f"the stack uses less than {most:.0%} of a core")
