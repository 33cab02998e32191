"""Several groups that one process is in, which end together."""

from engine.distributed.group import Group


class Bundle:
    """The groups; what is exchanged in them is for whoever holds the bundle to say."""

    def __init__(self, *groups: Group | None) -> None:
        """Take the groups in the order in which they end; None is none."""
        self._groups = [group for group in groups if group is not None]

    def abort(self) -> None:
        """End all groups at once, from any thread: whoever waits in them, anywhere, is freed."""
        for group in self._groups:
            group.abort()

    def close(self) -> None:
        """Free sockets and threads; what is in flight has to be aborted first. Idempotent."""
        for group in self._groups:
            group.close()
