"""How an engine is ended that does not serve yet."""

from collections.abc import Iterator
from contextlib import contextmanager


class EarlyStop:
    """Ends a starting engine where it is, except where it would leave something behind.

    Importing libraries and loading a model take seconds and look at nothing meanwhile, so the
    signal's handler leaves them by an exception.
    """

    def __init__(self) -> None:
        self._held = 0
        self._asked = False

    def ask(self) -> None:
        """End now, or as soon as nothing holds it any more; for signal handlers.

        Raises:
            SystemExit: nothing holds it.
        """
        self._asked = True
        self._end_unless_held()

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
