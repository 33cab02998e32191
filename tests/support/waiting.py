"""Waiting for what has to become true, up to a deadline."""

import asyncio
import time
from collections.abc import Callable

INTERVAL = 0.02
"""Seconds between two looks at a condition."""
PATIENCE = 90.0
"""Seconds within which a condition holds on the slowest and busiest machine, or never does."""


def until(
    condition: Callable[[], object], what: str, within: float = PATIENCE, interval: float = INTERVAL
) -> float:
    """Wait until a condition holds; return how many seconds it took.

    Args:
        what: names the condition in the error.
        interval: seconds between two looks at it.
    """
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within, f"not within {within} s: {what}"
        time.sleep(interval)
    return time.monotonic() - began


async def until_async(
    condition: Callable[[], object], what: str, within: float = PATIENCE, interval: float = 0.002
) -> None:
    """The same for what other tasks of the event loop make true."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        await asyncio.sleep(interval)
