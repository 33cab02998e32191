"""The main thread of an engine that is not in a lockstep group."""

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from queue import SimpleQueue

from engine.core.events import Drain, InboxItem, Stop, Welcomed, receive
from engine.core.front_ends import CoreStep
from engine.core.hosted import HostedEngine
from engine.core.sender import Outlet
from engine.core.shutdown import Shutdown
from engine.core.watchdog import StepWatch
from engine.shared.messages import FormGroup

IDLE_STATS_INTERVAL = 2.0
"""Seconds between stats of an idle engine, so that old stats mean a problem."""

IDLE_STATS_DELAY = 0.005
"""Delay after the last step before idle stats are sent: often the next request arrives sooner."""

ANNOUNCEMENT_SECONDS = 0.05
"""Delay before the first step of a request that runs alone because it may crash the engine, and
before the next step of others: sockets send asynchronously, and unsent messages are lost in a
crash."""


@dataclass(eq=False)
class EngineLoop:
    """Steps while there is work, and otherwise blocks on the inbox.

    `run` waits in real time. Tests with a simulated clock call `run_once` instead, and override
    `compute` and `settle`.
    """

    core: HostedEngine
    inbox: "SimpleQueue[InboxItem]"
    outlet: Outlet
    watch: StepWatch
    _: KW_ONLY
    drain_timeout: float
    """Seconds after which a draining engine exits with unfinished requests."""
    on_iteration: Callable[[], None]
    """Called in every iteration."""
    on_drain: Callable[[], None]
    """Notifies the cluster that the engine accepts no new requests."""
    clock: Callable[[], float] = time.monotonic
    """Returns monotonic seconds."""

    def __post_init__(self) -> None:
        self._shutdown = Shutdown(self.core, self.drain_timeout)
        self._next_stats_at = float("-inf")
        """When to send the stats of an idle engine again."""
        self.wait = 0.0
        """Maximum seconds to wait for inbox items before the next `run_once`."""
        self.stopped: Stop | None = None
        """Why the loop has ended; None while it runs."""

    def run(self) -> Stop:
        """Step until a stop is due.

        Raises:
            StepFailed: the model or the bookkeeping failed; the engine cannot continue.
        """
        while self.stopped is None:
            self.on_iteration()
            self.run_once(receive(self.inbox, self.wait))
        return self.stopped

    def run_once(self, items: Sequence[InboxItem]) -> None:
        """Handle inbox items; then compute a step, send idle stats, or end the loop.

        Raises:
            StepFailed: a step failed, possibly while finishing it for an operator's call.
        """
        core, now = self.core, self.clock()
        had_work = core.has_work
        for item in items:
            match item:
                case Drain() | Stop():
                    self._shutdown.request(item, now)
                    if isinstance(item, Drain):
                        self.on_drain()
                case Welcomed() | FormGroup():
                    pass  # the engine is already a member, and in no group
                case _:
                    core.handle(item)
        self.wait = 0.0
        self.stopped = self._shutdown.due(now)
        if self.stopped is not None:
            return
        if core.has_work:
            if not had_work:
                # Otherwise work that ends within one step would never be reported.
                self._send_stats(now)
            self.compute(core.next_tokens)
            return
        if now >= self._next_stats_at:
            self._send_stats(now)
        self.wait = self._shutdown.wait(self._next_stats_at - now)

    def compute(self, tokens: int) -> None:
        """Run a step of at most this many tokens."""
        self.watch.begin(tokens, self.clock())
        self.computed(self.core.step())

    def computed(self, step: CoreStep) -> None:
        """Handle the end of a step: send its outputs and stats."""
        self.watch.end()
        pause = IDLE_STATS_INTERVAL if self.core.has_work else IDLE_STATS_DELAY
        self._next_stats_at = self.clock() + pause
        self.outlet.send_step(step)
        if step.exclusive_changes:
            self.settle(ANNOUNCEMENT_SECONDS)

    def settle(self, seconds: float) -> None:
        """Wait until messages have been sent."""
        time.sleep(seconds)

    def _send_stats(self, now: float) -> None:
        self._next_stats_at = now + IDLE_STATS_INTERVAL
        self.outlet.send_step(CoreStep({}, [], self.core.stats()))
