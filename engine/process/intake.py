"""What comes into an engine's loop, whichever loop it is: messages, and the end of it."""

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from engine.core.engine_core import EngineCore
from engine.process.receiver import (
    Drain,
    FrontEndJoined,
    FrontEndLeft,
    GrammarsSettled,
    InboxItem,
    Stop,
)
from engine.process.shared_sampling import SharedSampling
from engine.shared.messages import AbortRequests, AddRequest, UtilityCall

LATE_SENDS_SECONDS = 0.5
"""How long a draining engine without work waits for requests that are on their way."""

DRAINING_WAIT = 0.02
"""Seconds between looks at whether a draining engine may end."""


class Intake:
    """The inbox of a loop, and whether the engine has to end."""

    def __init__(
        self,
        core: EngineCore,
        inbox: "SimpleQueue[InboxItem]",
        *,
        on_turn: Callable[[], None],
        on_drain: Callable[[], None],
        drain_timeout: float,
    ) -> None:
        """Wire a loop's inbox; `on_turn` is called for as long as the loop goes round."""
        self._core = core
        self._inbox = inbox
        self.turn = on_turn
        self._on_drain = on_drain
        self._drain_timeout = drain_timeout
        self._sampling = SharedSampling()
        self._draining_since: float | None = None
        self._stopped: Stop | None = None

    def receive(self, within: float) -> list[InboxItem]:
        """Wait for at most `within` seconds; return everything that has come, in order."""
        self.turn()
        if self._draining_since is not None:
            within = min(within, DRAINING_WAIT)
        items = []
        try:
            items.append(self._inbox.get(within > 0, within))
            while True:
                items.append(self._inbox.get_nowait())
        except Empty:
            return items

    def take(self, item: InboxItem) -> None:
        """Handle what means the same in every loop; the rest is ignored."""
        match item:
            case AddRequest():
                self._core.handle(self._sampling.shared(item))
            case AbortRequests() | UtilityCall():
                self._core.handle(item)
            case FrontEndJoined(index, incarnation):
                self._core.front_end_joined(index, incarnation)
            case FrontEndLeft(index):
                self._sampling.forget(index)
                self._core.front_end_left(index)
            case GrammarsSettled():
                self._core.grammars_settled()
            case Drain():
                self._draining_since = time.monotonic()
                self._on_drain()
            case Stop():
                self._stopped = item

    def stopped(self) -> Stop | None:
        """Return why the engine has to end now, if it has to."""
        if self._stopped is None and self._has_drained():
            self._stopped = Stop()
        return self._stopped

    def _has_drained(self) -> bool:
        if self._draining_since is None:
            return False
        elapsed = time.monotonic() - self._draining_since
        if self._core.has_requests:
            return elapsed > self._drain_timeout
        # What front ends sent before they heard of it may still be on its way.
        return elapsed > LATE_SENDS_SECONDS or not self._core.has_front_ends
