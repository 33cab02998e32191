"""Which number a newcomer gets: a state machine without I/O.

Engines are identified by their ranks, front ends by their indices. A newcomer that has a number
keeps it; one that asks for a number gets the lowest free one. A coordinator that has just started
does not know yet which are free: members of its predecessor may be alive, and register again within
the timeout after which silent members are removed. If one of them lost its number to a newcomer,
engines would drop its requests, or front ends would move them. So no number is assigned before that
timeout, unless the coordinator was told that there are no such members.
"""

from collections.abc import Mapping

from engine.shared.membership import JOIN_TIMEOUT
from engine.shared.messages import Hello, Refused

MAX_WAIT = JOIN_TIMEOUT / 2
"""Seconds after its start from which a coordinator assigns numbers in any case, which bounds the
wait of newcomers."""


class Numbers:
    """Gives out the numbers of one coordinator's members.

    Args:
        grace: seconds after which members that do not register again are gone; 0 if there are none.
    """

    def __init__(self, grace: float) -> None:
        self._grace = min(grace, MAX_WAIT)
        self._open_at: float | None = None

    def begin(self, now: float) -> None:
        """Note when the coordinator began; only the first call counts."""
        if self._open_at is None:
            self._open_at = now + self._grace

    def number_for(self, hello: Hello, held: Mapping[int, int], now: float) -> int | Refused:
        """Return a newcomer's number, or that it has to ask again.

        Args:
            held: incarnations of all members of its kind, by number.
        """
        if hello.index >= 0:
            return hello.index
        for number, incarnation in held.items():
            if incarnation == hello.incarnation:
                return number
        if self._open_at is None or now < self._open_at:
            return Refused(
                f"the coordinator has just started: it gives out numbers after {self._grace:.0f} "
                "s, when the members of one before it have told it theirs",
                field="index",
                final=False,
            )
        return next(number for number in range(len(held) + 1) if number not in held)
