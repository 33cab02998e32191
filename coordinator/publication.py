"""When the cluster's view is published: a state machine without I/O."""


class Publication:
    """Numbers the views of one coordinator, and says when the next is due.

    Args:
        interval: minimum seconds between two views of which only the load is new.
        idle_interval: seconds after which a view is published although nothing is new.
    """

    def __init__(self, interval: float, idle_interval: float) -> None:
        self.version = 0
        """Number of the newest view."""
        self.changed = False
        """Something is new, which may wait for the interval."""
        self.urgent = False
        """Something is new that everybody has to know at once."""
        self.urgent_interval = 0.0
        """Minimum seconds between two views in any case."""
        self._interval = interval
        self._idle_interval = idle_interval
        self._last: float | None = None

    def deadline(self, now: float) -> float:
        """Return when the next view is due if nothing else happens."""
        if self._last is None:
            return now
        if self.urgent:
            return self._last + self.urgent_interval
        return self._last + (self._interval if self.changed else self._idle_interval)

    def take_due(self, now: float) -> bool:
        """Return whether a view is to be published now, which then counts as published."""
        if now < self.deadline(now):
            return False
        self.urgent = self.changed = False
        self._last = now
        self.version += 1
        return True
