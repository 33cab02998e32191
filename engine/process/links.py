"""Which front ends an engine is connected to, as the coordinator's lists say: no I/O.

The shell connects and disconnects what `update` and `tick` return, and sends each hello on the
request connection of its front end. Hellos are repeated, as a sign of life over the connections of
requests and answers; a lost one costs an interval.

An engine that has just become ready asks in its hellos which front ends route to it already. Its
supervisor waits for that before it ends another engine, so that no front end is left without one.
"""

from typing import NamedTuple

from engine.shared.messages import FrontEndEntry, RouteHello, RouteTaken
from engine.shared.roster import Roster

ASK_INTERVAL = 0.02
"""Seconds between hellos while front ends are asked whether they route to the engine."""


class LinkChanges(NamedTuple):
    """What to do, in this order."""

    left: list[int]
    """Front ends to disconnect from."""
    joined: list[FrontEndEntry]
    """Front ends to connect to."""
    hellos: list[tuple[int, RouteHello]]
    """What to send, by front end."""


class FrontEndLinks:
    """The connections of one engine process to all front ends within its scope.

    Args:
        incarnation: of the engine.
        node: name of the engine's node.
        grace: seconds for which front ends that a restarted coordinator does not list are kept,
            and for which front ends that do not answer are asked.
        interval: seconds between hellos.
    """

    def __init__(self, incarnation: int, node: str, grace: float, interval: float) -> None:
        self._incarnation = incarnation
        self._node = node
        self._interval = interval
        self._roster: Roster[FrontEndEntry] = Roster(grace)
        self._sessions: dict[int, int] = {}
        self._num_sessions = 0
        self._greet_at = 0.0
        self._grace = grace
        self._ask_until: float | None = None
        self._drains = False
        self._answered: set[int] = set()

    def serve(self, now: float) -> None:
        """The engine serves from now on: ask all front ends whether they route to it."""
        self._ask_until = now + self._grace
        self._greet_at = now

    def drain(self, now: float) -> None:
        """The engine takes nothing new from now on: tell all front ends."""
        self._drains = True
        self._greet_at = now

    def answered(self, answer: RouteTaken) -> None:
        """A front end routes to the engine."""
        self._answered.add(answer.session)

    def take_unconfirmed(self, now: float) -> list[int] | None:
        """Return which front ends still do not route to an engine that serves, once.

        None before it serves, while waiting for them is still worthwhile, and once they were told.
        """
        if self._ask_until is None:
            return None
        unconfirmed = [each for each, of in self._sessions.items() if of not in self._answered]
        if unconfirmed and now < self._ask_until:
            return None
        self._ask_until = None
        return unconfirmed

    @property
    def wait(self) -> float:
        """Seconds after which `tick` has to be called again at the latest."""
        return self._interval if self._ask_until is None else ASK_INTERVAL

    def update(
        self, rank: int, epoch: int, entries: list[FrontEndEntry], now: float
    ) -> LinkChanges:
        """Take a complete list of the coordinator of `epoch`; `rank` is this engine's."""
        listed = {each.index: each for each in entries if each.scope.contains(rank, self._node)}
        change = self._roster.update(epoch, listed, now)
        self._forget(change.left)
        for index in change.joined:
            self._num_sessions += 1
            self._sessions[index] = self._num_sessions
        joined = [listed[index] for index in change.joined]
        return LinkChanges(change.left, joined, self._route_hellos(rank, change.joined))

    def tick(self, rank: int, now: float) -> LinkChanges:
        """Time has passed."""
        left = self._roster.expire(now)
        self._forget(left)
        due = now >= self._greet_at
        if due:
            self._greet_at = now + self.wait
        return LinkChanges(left, [], self._route_hellos(rank, list(self._sessions) if due else []))

    def _forget(self, indices: list[int]) -> None:
        for index in indices:
            self._answered.discard(self._sessions.pop(index, 0))

    def _route_hellos(self, rank: int, indices: list[int]) -> list[tuple[int, RouteHello]]:
        asks = self._ask_until is not None
        return [
            (
                index,
                RouteHello(rank, self._incarnation, self._sessions[index], asks, self._drains),
            )
            for index in indices
        ]
