"""When a place whose process died is filled again: a state machine without I/O."""

FIRST_BACKOFF = 0.5
"""Seconds before a process that died is started again; doubles while it keeps dying."""

LONGEST_BACKOFF = 30.0
"""Most seconds before a process that keeps dying is started again."""

STABLE_AFTER = 60.0
"""Seconds of life after which a process's earlier deaths are forgiven."""


class Restarts:
    """The deaths in one place."""

    def __init__(self) -> None:
        self._backoff = FIRST_BACKOFF
        self._has_died = False

    def wait_after(self, lived: float, *, was_ready: bool) -> float | None:
        """Return the seconds until the next start, after a process lived so many seconds.

        None if there is none: the first process of a place could not start, nor would another.
        """
        if not was_ready and not self._has_died:
            return None
        self._has_died = True
        if lived > STABLE_AFTER:
            self._backoff = FIRST_BACKOFF
        wait = self._backoff
        self._backoff = min(LONGEST_BACKOFF, wait * 2)
        return wait
