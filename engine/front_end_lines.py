"""Which front ends an engine is connected to, as the coordinator's lists say: no I/O.

The shell connects and disconnects what `update` and `tick` return, and sends each greeting on the
request connection of its front end. Greetings are repeated, as a sign of life that takes the very
way that requests and answers take; losing one costs an interval.
"""

from typing import NamedTuple

from engine.messages import EngineGreeting, FrontEndEntry
from engine.roster import Roster


class LineChanges(NamedTuple):
    """What to do, in this order."""

    left: list[int]
    """Front ends to disconnect from."""
    joined: list[FrontEndEntry]
    """Front ends to connect to."""
    greetings: list[tuple[int, EngineGreeting]]
    """What to send, by front end."""


class FrontEndLines:
    """The connections of one engine process to all front ends within its reach.

    Args:
        incarnation: of the engine.
        node: name of the engine's node.
        grace: seconds for which front ends that a restarted coordinator does not list are kept.
        interval: seconds between greetings.
    """

    def __init__(self, incarnation: int, node: str, grace: float, interval: float) -> None:
        self._incarnation = incarnation
        self._node = node
        self._interval = interval
        self._roster: Roster[FrontEndEntry] = Roster(grace)
        self._sessions: dict[int, int] = {}
        self._num_sessions = 0
        self._greet_at = 0.0

    def update(
        self, rank: int, epoch: int, entries: list[FrontEndEntry], now: float
    ) -> LineChanges:
        """Take a complete list of the coordinator of `epoch`; `rank` is this engine's."""
        listed = {each.index: each for each in entries if each.reach.contains(rank, self._node)}
        change = self._roster.update(epoch, listed, now)
        self._forget(change.left)
        for index in change.joined:
            self._num_sessions += 1
            self._sessions[index] = self._num_sessions
        joined = [listed[index] for index in change.joined]
        return LineChanges(change.left, joined, self._greetings(rank, change.joined))

    def tick(self, rank: int, now: float) -> LineChanges:
        """Time has passed."""
        left = self._roster.expire(now)
        self._forget(left)
        due = now >= self._greet_at
        if due:
            self._greet_at = now + self._interval
        return LineChanges(left, [], self._greetings(rank, list(self._sessions) if due else []))

    def _forget(self, indices: list[int]) -> None:
        for index in indices:
            self._sessions.pop(index, None)

    def _greetings(self, rank: int, indices: list[int]) -> list[tuple[int, EngineGreeting]]:
        return [
            (index, EngineGreeting(rank, self._incarnation, self._sessions[index]))
            for index in indices
        ]
