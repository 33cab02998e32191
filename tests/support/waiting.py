"""Waiting for what has to become true, up to a deadline."""

import asyncio
import time
from collections.abc import Callable

INTERVAL = 0.02
"""Seconds between the first two looks at a condition."""
LONGEST_INTERVAL = 0.2
_PATIENT_SHARE = 0.05
"""Of the time waited so far: so long later a condition may be seen, where that is more. To look
costs the stack as well as its test: most conditions are asked of its metrics."""
PATIENCE = 90.0
"""Seconds within which a condition holds on the slowest and busiest machine, or never does."""


def until(
    condition: Callable[[], object], what: str, within: float = PATIENCE, interval: float = INTERVAL
) -> float:
    """Wait until a condition holds; return how many seconds it took.

    Args:
        what: names the condition in the error.
        interval: seconds between two looks at it, of which there are fewer the longer it takes.
    """
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < within, f"not within {within} s: {what}"
        time.sleep(max(interval, min(_PATIENT_SHARE * waited, LONGEST_INTERVAL)))
    return time.monotonic() - began


async def until_async(
    condition: Callable[[], object], what: str, within: float = PATIENCE, interval: float = 0.002
) -> None:
    """The same for what other tasks of the event loop make true."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        await asyncio.sleep(interval)
