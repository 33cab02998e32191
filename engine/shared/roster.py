"""Members according to the coordinator's lists, preserved over coordinator restarts.

A restarted coordinator learns its members one by one. Members missing from a new epoch's lists are
kept for a grace period; a member that this epoch has listed before and no longer lists is removed
immediately.
"""

from collections.abc import Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar


class Incarnated(Protocol):
    """Anything with an incarnation, which changes when its process restarts."""

    @property
    def incarnation(self) -> int: ...


T = TypeVar("T", bound=Incarnated)


class Change(NamedTuple):
    """Effect of an update; a replaced member is in both lists."""

    joined: list[int]
    left: list[int]


class Roster(Generic[T]):
    """Members by index (rank or front-end number)."""

    def __init__(self, grace: float) -> None:
        self.members: dict[int, T] = {}
        self._grace = grace
        self._epoch: int | None = None
        self._confirmed: set[int] = set()
        self._missing_since: dict[int, float] = {}

    def update(self, epoch: int, listed: Mapping[int, T], now: float) -> Change:
        """Apply a complete list from the coordinator; `now` is in seconds, monotonic."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._confirmed = set()
            self._missing_since = {}
        replaced = [
            index
            for index, member in self.members.items()
            if index in listed and listed[index].incarnation != member.incarnation
        ]
        timed_out = []
        for index in self.members:
            if index in listed:
                self._missing_since.pop(index, None)
            elif index in self._confirmed:
                timed_out.append(index)
            else:
                self._missing_since.setdefault(index, now)
        joined = [index for index in listed if index not in self.members] + replaced
        self._forget(timed_out)
        self.members.update(listed)
        self._confirmed = set(listed)
        left = replaced + timed_out + self.expire(now)
        return Change(joined, left)

    def expire(self, now: float) -> list[int]:
        """Remove and return the members that were missing for longer than the grace period."""
        overdue = [i for i, since in self._missing_since.items() if now - since > self._grace]
        self._forget(overdue)
        return overdue

    def record_alive(self, index: int, now: float) -> None:
        """Restart the grace period of a missing member, which was heard from directly."""
        if index in self._missing_since:
            self._missing_since[index] = now

    def _forget(self, indices: list[int]) -> None:
        for index in indices:
            self.members.pop(index, None)
            self._missing_since.pop(index, None)
