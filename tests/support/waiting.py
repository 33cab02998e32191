"""Waiting for conditions, up to a deadline."""

import asyncio
import time
from collections.abc import Callable

INTERVAL = 0.02
"""Initial seconds between checks of a condition."""
LONGEST_INTERVAL = 0.2
_PATIENT_SHARE = 0.05
"""Minimum interval as a fraction of the time waited so far. Checks cost the stack as well as the
test: most conditions query its metrics."""
PATIENCE = 90.0
"""Seconds after which a condition has failed, even on the slowest and busiest machine."""


def until(
    condition: Callable[[], object], what: str, within: float = PATIENCE, interval: float = INTERVAL
) -> float:
    """Wait until a condition holds; return the seconds it took.

    Args:
        what: name of the condition, for the error.
        interval: initial seconds between checks; it grows with the time waited.
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
    """Wait until a condition that other tasks of the event loop make true."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        await asyncio.sleep(interval)
