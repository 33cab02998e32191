"""How an engine is ended that does not serve yet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

ASK_AGAIN_SECONDS = 0.5
"""Seconds after which an engine that was asked to end and still starts is asked again."""


class EarlyStop:
    """Ends a starting engine where it is, except where it would leave something behind.

    Importing libraries and loading a model take seconds and look at nothing meanwhile, so the
    signal's handler leaves them by an exception. That may be lost: a compiler that calls back into
    Python passes none on. So the engine is asked again until it has left what it was doing.

    Args:
        ask_again: has the engine asked again after so many seconds; after 0: not any more.
    """

    def __init__(self, ask_again: Callable[[float], object] = lambda seconds: None) -> None:
        self._ask_again = ask_again
        self._held = 0
        self._asked = False
        self._has_left = False

    def ask(self) -> None:
        """End now, or as soon as nothing holds it any more; for signal handlers.

        Raises:
            SystemExit: nothing holds it.
        """
        if self._has_left:
            return
        self._asked = True
        self._ask_again(ASK_AGAIN_SECONDS)
        self._end_unless_held()

    def has_left(self) -> None:
        """The engine ends, for whatever reason: nothing has to be left any more."""
        self._has_left = True
        self._ask_again(0.0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do not end within; for what starts processes or ends them.

        Raises:
            SystemExit: at the end, if the engine was asked to end meanwhile.
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
