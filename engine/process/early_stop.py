"""Stopping an engine during startup."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

ASK_AGAIN_SECONDS = 0.5
"""Seconds after which a stop request to a starting engine is repeated."""


class EarlyStop:
    """Stops a starting engine immediately, except in sections that would leave something behind.

    Importing libraries and loading a model take seconds without checking for requests, so the
    signal handler interrupts them by an exception. It can get lost: a compiler that calls back into
    Python swallows exceptions. So the request is repeated until the engine has left startup.

    Args:
        ask_again: schedules another call of `ask` after the given seconds; 0 cancels it.
    """

    def __init__(self, ask_again: Callable[[float], object] = lambda seconds: None) -> None:
        self._ask_again = ask_again
        self._held = 0
        self._asked = False
        self._has_left = False

    def ask(self) -> None:
        """Stop now, or at the end of `held` sections; for signal handlers.

        Raises:
            SystemExit: no section holds it.
        """
        if self._has_left:
            return
        self._asked = True
        self._ask_again(ASK_AGAIN_SECONDS)
        self._end_unless_held()

    def has_left(self) -> None:
        """Record that startup is over, for whatever reason; later requests are ignored."""
        self._has_left = True
        self._ask_again(0.0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer a stop to the end of the context; for starting and stopping processes.

        Raises:
            SystemExit: at the end, if a stop was requested meanwhile.
        """
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._asked:
            self._end_unless_held()

    def _end_unless_held(self) -> None:
        if not self._held:
            raise SystemExit(0)
