"""The end of a client's connection, without a task per request that waits for it."""

from collections.abc import Callable

CONNECTION_END = "swell.connection_end"
"""Key of the ASGI scope: the `ConnectionEnd` of the request's connection."""


class ConnectionEnd:
    """Calls functions when a connection ends."""

    def __init__(self) -> None:
        self.has_come = False
        self._callbacks = set[Callable[[], None]]()

    def watch(self, callback: Callable[[], None]) -> None:
        """Call a function at the end."""
        self._callbacks.add(callback)

    def unwatch(self, callback: Callable[[], None]) -> None:
        """Do not call a function any more."""
        self._callbacks.discard(callback)

    def come(self) -> None:
        """Record the end."""
        self.has_come = True
        for callback in tuple(self._callbacks):
            callback()
