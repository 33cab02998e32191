"""What the loop of an engine that steps alone does next: a state machine without I/O.

A turn takes what has come since the one before and ends with one of three actions: `Compute` a
step and give it to `computed`, `Rest` until something comes, or `End`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.ending import Ending
from engine.core.front_ends import CoreStep
from engine.core.hosted import HostedEngine
from engine.core.inbox import Drain, InboxItem, Stop, Welcomed
from engine.shared.messages import FormGroup

IDLE_STATS_INTERVAL = 2.0
"""Seconds between stats of an engine without work, so that their age tells stale from idle."""

END_SECONDS = 0.005
"""Pause after the last step before it is told again that there is no work: until then what comes
next may have come."""

ANNOUNCEMENT_SECONDS = 0.05
"""Pause before the first step of a request that runs alone because it may kill, and before the
first of others after it: sockets write in a thread of their own, and what they have not written
dies with the engine."""


class Say(NamedTuple):
    """Tell front ends and the coordinator."""

    step: CoreStep


class RefuseNew(NamedTuple):
    """Tell the cluster that the engine takes nothing new."""


class Settle(NamedTuple):
    """Do nothing for this many seconds, so that what was sent arrives."""

    seconds: float


class Compute(NamedTuple):
    """Take a step of at most this many tokens."""

    tokens: int


class Rest(NamedTuple):
    """Sleep on the inbox for at most this many seconds."""

    seconds: float


class End(NamedTuple):
    """Leave the loop."""

    stop: Stop


Action = Say | RefuseNew | Settle | Compute | Rest | End


class Turns:
    """The turns of one engine's loop; times are in seconds, monotonic."""

    def __init__(self, core: HostedEngine, drain_timeout: float) -> None:
        self._core = core
        self._ending = Ending(core, drain_timeout)
        self._tell_at = float("-inf")

    def turn(self, items: Sequence[InboxItem], now: float) -> list[Action]:
        """Take what has come and return what to do.

        Raises:
            StepFailed: an operator's call had to finish the steps in flight, and one failed.
        """
        core = self._core
        had_work = core.has_work
        actions: list[Action] = []
        for item in items:
            match item:
                case Drain() | Stop():
                    self._ending.asked(item, now)
                    if isinstance(item, Drain):
                        actions.append(RefuseNew())
                case Welcomed() | FormGroup():
                    pass  # it is a member already, and of no group
                case _:
                    core.handle(item)
        stop = self._ending.due(now)
        if stop is not None:
            actions.append(End(stop))
        elif core.has_work:
            if not had_work:
                # Work that begins and ends within one step has to be seen to have begun.
                actions.append(self._stats(now))
            actions.append(Compute(core.next_tokens))
        else:
            if now >= self._tell_at:
                actions.append(self._stats(now))
            actions.append(Rest(self._ending.wait(self._tell_at - now)))
        return actions

    def computed(self, step: CoreStep, now: float) -> list[Action]:
        """Return what to do with a step that is over; then comes the next turn."""
        self._tell_at = now + (IDLE_STATS_INTERVAL if self._core.has_work else END_SECONDS)
        actions: list[Action] = [Say(step)]
        if step.changes_alone:
            actions.append(Settle(ANNOUNCEMENT_SECONDS))
        return actions

    def _stats(self, now: float) -> Say:
        self._tell_at = now + IDLE_STATS_INTERVAL
        return Say(CoreStep({}, [], self._core.stats()))
