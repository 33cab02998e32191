"""When an engine that was asked to stop can exit. No I/O."""

from engine.core.events import Drain, Stop
from engine.core.hosted import HostedEngine

LATE_SENDS_SECONDS = 0.5
"""Seconds for which a draining engine without work waits for requests in transit."""

DRAINING_WAIT = 0.02
"""Seconds between checks whether a draining engine can exit."""


class Shutdown:
    """Orders to stop one engine, and whether it can exit.

    Args:
        core: the engine.
        drain_timeout: seconds after which a draining engine exits with unfinished requests.
    """

    def __init__(self, core: HostedEngine, drain_timeout: float) -> None:
        self._core = core
        self._drain_timeout = drain_timeout
        self._draining_since: float | None = None
        self._stop: Stop | None = None

    def request(self, order: Drain | Stop, now: float) -> None:
        """Record an order to stop, immediately or once drained; `now` is monotonic seconds."""
        if isinstance(order, Stop):
            self._stop = order
        elif self._draining_since is None:
            self._draining_since = now

    def wait(self, at_most: float) -> float:
        """Return the seconds for which an engine without work can block on its inbox."""
        return at_most if self._draining_since is None else min(at_most, DRAINING_WAIT)

    def due(self, now: float) -> Stop | None:
        """Return the reason if the engine has to exit now, else None."""
        if self._stop is None and self._draining_since is not None:
            elapsed = now - self._draining_since
            if self._core.has_requests:
                has_drained = elapsed > self._drain_timeout
            else:  # requests sent before front ends were notified may be in transit
                has_drained = elapsed > LATE_SENDS_SECONDS or not self._core.has_front_ends
            self._stop = Stop() if has_drained else None
        return self._stop
