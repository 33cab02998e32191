"""Notifies the handler of a request when its client disconnects, without a task per request."""

from collections.abc import Callable

DISCONNECT = "swell.disconnect"
"""Key of the ASGI scope: the `DisconnectNotifier` of the request's connection."""


class DisconnectNotifier:
    """Calls functions when a connection is closed."""

    def __init__(self) -> None:
        self.is_disconnected = False
        self._callbacks = set[Callable[[], None]]()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call a function when the connection is closed."""
        self._callbacks.add(callback)

    def remove_callback(self, callback: Callable[[], None]) -> None:
        """Do not call a function any more."""
        self._callbacks.discard(callback)

    def notify(self) -> None:
        """Record that the connection is closed, and call all functions."""
        self.is_disconnected = True
        for callback in tuple(self._callbacks):
            callback()
