"""When a place whose process died is filled again: a state machine without I/O."""

FIRST_BACKOFF = 0.5
"""Seconds before a process that died is started again; doubles while it keeps dying."""

LONGEST_BACKOFF = 30.0
"""Maximum seconds before a process that keeps dying is started again."""

LONGEST_SPAWN_BACKOFF = 5.0
"""Maximum seconds before a process that could not be created is tried again: that is cheap."""

STABLE_AFTER = 60.0
"""Seconds of life after which a process's earlier deaths are forgiven."""


class Restarts:
    """The deaths in one place.

    Args:
        proven: whether a process has served there already, before these are counted.
    """

    def __init__(self, *, proven: bool = False) -> None:
        self._backoff = FIRST_BACKOFF
        self._spawn_backoff = FIRST_BACKOFF
        self._has_died = False
        self._proven = proven

    def wait_after(self, lived: float, *, was_ready: bool, hopeless: bool = False) -> float | None:
        """Return the seconds until the next start, after a process lived so many seconds.

        None if there is none: the first process of a place could not start, nor would another,
        or it has said itself that starting it again is `hopeless`.
        """
        self._spawn_backoff = FIRST_BACKOFF
        is_first = not was_ready and not self._has_died
        if is_first and (hopeless or not self._proven):
            return None
        self._has_died = True
        if lived > STABLE_AFTER:
            self._backoff = FIRST_BACKOFF
        wait = self._backoff
        self._backoff = min(LONGEST_BACKOFF, wait * 2)
        return wait

    def wait_after_failed_spawn(self) -> float | None:
        """Return the seconds until the next try, after no process could be made at all.

        None if the place has never held one: the operator has to know.
        """
        if not self._has_died and not self._proven:
            return None
        wait = self._spawn_backoff
        self._spawn_backoff = min(LONGEST_SPAWN_BACKOFF, wait * 2)
        return wait
