"""The main thread of an engine that steps alone."""

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from engine.core.ending import Ending
from engine.core.events import Drain, InboxItem, Stop, Welcomed, receive
from engine.core.front_ends import CoreStep
from engine.core.hosted import HostedEngine
from engine.core.sender import Outlet
from engine.core.watchdog import StepWatch
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


class EngineLoop:
    """Steps whenever there is work and sleeps on the inbox otherwise.

    `run` waits in real time. Tests that have a time of their own call `turn` in its place, and let
    `compute` and `settle` take time.
    """

    def __init__(
        self,
        core: HostedEngine,
        inbox: "SimpleQueue[InboxItem]",
        outlet: Outlet,
        watch: StepWatch,
        *,
        drain_timeout: float,
        on_turn: Callable[[], None],
        on_drain: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire a loop.

        Args:
            drain_timeout: seconds after which a draining engine ends with whatever is left.
            on_turn: is called in each turn.
            on_drain: tells the cluster that the engine takes nothing new.
            clock: returns seconds, monotonic.
        """
        self._core = core
        self._ending = Ending(core, drain_timeout)
        self._inbox = inbox
        self._outlet = outlet
        self._watch = watch
        self._on_turn = on_turn
        self._on_drain = on_drain
        self._clock = clock
        self._tell_at = float("-inf")
        """When the stats of an engine without work are told again."""
        self.wait = 0.0
        """Seconds until the next turn, unless something comes into the inbox."""
        self.stopped: Stop | None = None
        """Why the loop has ended."""

    def run(self) -> Stop:
        """Step until something asks to stop.

        Raises:
            StepFailed: the model or the bookkeeping failed; the engine cannot go on.
        """
        while self.stopped is None:
            self._on_turn()
            self.turn(receive(self._inbox, self.wait))
        return self.stopped

    def turn(self, items: Sequence[InboxItem]) -> None:
        """Take what has come into the inbox; compute a step, say that there is no work, or end.

        Raises:
            StepFailed: a step, or what an operator's call had to finish of one, failed.
        """
        core, now = self._core, self._clock()
        had_work = core.has_work
        for item in items:
            match item:
                case Drain() | Stop():
                    self._ending.asked(item, now)
                    if isinstance(item, Drain):
                        self._on_drain()
                case Welcomed() | FormGroup():
                    pass  # it is a member already, and of no group
                case _:
                    core.handle(item)
        self.wait = 0.0
        self.stopped = self._ending.due(now)
        if self.stopped is not None:
            return
        if core.has_work:
            if not had_work:
                # Work that begins and ends within one step has to be seen to have begun.
                self._tell(now)
            self.compute(core.next_tokens)
            return
        if now >= self._tell_at:
            self._tell(now)
        self.wait = self._ending.wait(self._tell_at - now)

    def compute(self, tokens: int) -> None:
        """Take a step of at most this many tokens."""
        self._watch.begin(tokens, self._clock())
        self.computed(self._core.step())

    def computed(self, step: CoreStep) -> None:
        """A step is over: tell what it has to say."""
        self._watch.end()
        pause = IDLE_STATS_INTERVAL if self._core.has_work else END_SECONDS
        self._tell_at = self._clock() + pause
        self._outlet.say(step)
        if step.changes_alone:
            self.settle(ANNOUNCEMENT_SECONDS)

    def settle(self, seconds: float) -> None:
        """Do nothing for a while, so that what was sent arrives."""
        time.sleep(seconds)

    def _tell(self, now: float) -> None:
        self._tell_at = now + IDLE_STATS_INTERVAL
        self._outlet.say(CoreStep({}, [], self._core.stats()))
