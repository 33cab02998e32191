"""Stopping an engine during startup."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

RETRY_SECONDS = 0.5
"""Seconds after which a stop request to a starting engine is repeated."""


class EarlyStop:
    """Stops a starting engine immediately, except in sections that would leave something behind.

    Importing libraries and loading a model take seconds without checking for requests, so the
    signal handler interrupts them by an exception. It can get lost: a compiler that calls back into
    Python swallows exceptions. So the request is repeated until the engine has left startup.

    Args:
        schedule_retry: schedules another call of `request` after the given seconds; 0 cancels it.
    """

    def __init__(self, schedule_retry: Callable[[float], object] = lambda seconds: None) -> None:
        self._schedule_retry = schedule_retry
        self._num_deferrals = 0
        self._requested = False
        self._startup_over = False

    def request(self) -> None:
        """Stop now, or at the end of `deferred` sections; for signal handlers.

        Raises:
            SystemExit: no section defers it.
        """
        if self._startup_over:
            return
        self._requested = True
        self._schedule_retry(RETRY_SECONDS)
        self._exit_unless_deferred()

    def startup_over(self) -> None:
        """Record that startup is over, for whatever reason; later requests are ignored."""
        self._startup_over = True
        self._schedule_retry(0.0)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer a stop to the end of the context; for starting and stopping processes.

        Raises:
            SystemExit: at the end, if a stop was requested meanwhile.
        """
        self._num_deferrals += 1
        try:
            yield
        finally:
            self._num_deferrals -= 1
        if self._requested:
            self._exit_unless_deferred()

    def _exit_unless_deferred(self) -> None:
        if not self._num_deferrals:
            raise SystemExit(0)
