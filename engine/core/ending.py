"""When an engine that was asked to end may do so. No I/O."""

from engine.core.events import Drain, Stop
from engine.core.hosted import HostedEngine

LATE_SENDS_SECONDS = 0.5
"""How long a draining engine without work waits for requests that are on their way."""

DRAINING_WAIT = 0.02
"""Seconds between looks at whether a draining engine may end."""


class Ending:
    """Whether one engine has been asked to end, and whether it can.

    Args:
        core: what has to be finished.
        drain_timeout: seconds after which a draining engine ends with whatever is left.
    """

    def __init__(self, core: HostedEngine, drain_timeout: float) -> None:
        self._core = core
        self._drain_timeout = drain_timeout
        self._draining_since: float | None = None
        self._stop: Stop | None = None

    def asked(self, order: Drain | Stop, now: float) -> None:
        """The engine has to end: when its requests have (seconds, monotonic), or at once."""
        if isinstance(order, Stop):
            self._stop = order
        elif self._draining_since is None:
            self._draining_since = now

    def wait(self, at_most: float) -> float:
        """Return for how many seconds an engine without work may sleep on its inbox."""
        return at_most if self._draining_since is None else min(at_most, DRAINING_WAIT)

    def due(self, now: float) -> Stop | None:
        """Return why the engine has to end now, if it has to."""
        if self._stop is None and self._draining_since is not None:
            elapsed = now - self._draining_since
            if self._core.has_requests:
                has_drained = elapsed > self._drain_timeout
            else:  # what front ends sent before they heard of it may still be on its way
                has_drained = elapsed > LATE_SENDS_SECONDS or not self._core.has_front_ends
            self._stop = Stop() if has_drained else None
        return self._stop
