"""Virtual time, and links between processes that delay, drop, duplicate and cut messages.

Every link is FIFO per channel, like the sockets. Messages sent while a link is cut arrive when it
is restored, or are lost if the cut resets the connection.
"""

import heapq
import random
from collections.abc import Callable
from typing import Any, NamedTuple

HOP = 0.002
"""Maximum latency of a message in seconds."""


class Clock:
    """Calls functions in order of virtual time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function` at `time`, after everything already scheduled for that time."""
        self._count += 1
        heapq.heappush(self._queue, (max(time, self.now), self._count, function, arguments))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Run until `until`, or until `stop()` is true, checked every tenth of a second."""
        queue, look = self._queue, self.now + 0.1
        while queue and queue[0][0] <= until:
            if queue[0][0] >= look:
                if stop():
                    return
                look = queue[0][0] + 0.1
            self.now, _, function, arguments = heapq.heappop(queue)
            function(*arguments)
        self.now = max(self.now, until)


class Process:
    """A process that can be killed, and stopped for a while."""

    def __init__(self, clock: Clock, name: str, incarnation: int) -> None:
        self.clock = clock
        self.name = name
        """Name of its role, which its successors share."""
        self.incarnation = incarnation
        self.alive = True
        self.stopped = False
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function in the process: now, when it is resumed, or never if it is dead."""
        if self.stopped:
            self._held.append((function, arguments))
        elif self.alive:
            function(*arguments)

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function in the process later."""
        self.clock.at(self.clock.now + seconds, self.call, function, *arguments)

    def stop(self) -> None:
        """Suspend the process until `go_on`."""
        self.stopped = True

    def go_on(self) -> None:
        """Resume, and catch up with everything that arrived meanwhile."""
        self.stopped = False
        held, self._held = self._held, []
        for function, arguments in held:
            self.call(function, *arguments)

    def kill(self) -> None:
        """Kill the process."""
        self.alive = False
        self.stopped = False
        self._held = []


class _Cut(NamedTuple):
    until: float
    resets: bool


class Network:
    """All links between the processes of a cluster."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._random = rng.random
        self._arrivals: dict[tuple[Process, Process, str], float] = {}
        self._cuts: dict[tuple[str, str], _Cut] = {}
        self._epochs: dict[tuple[str, str], int] = {}
        self.lossy_until = 0.0
        """Until then, control messages are randomly lost or duplicated."""
        self.slow_until = 0.0
        """Until then control messages take up to a second."""

    def send(
        self,
        source: Process,
        target: Process,
        channel: str,
        function: Callable[..., None],
        *arguments: Any,
        control: bool = True,
    ) -> None:
        """Call `function` in `target` when the message arrives there."""
        now = self._clock.now
        delay = HOP * self._random()
        copies = 1
        if control and now < self.lossy_until:
            draw = self._random()
            copies = 0 if draw < 0.3 else 2 if draw < 0.5 else 1
        if control and now < self.slow_until:
            delay = self._random()
        pair = (source.name, target.name)
        cut = self._cuts.get(pair)
        if cut is not None and cut.until > now:
            if cut.resets:
                return
            delay += cut.until - now
        key = (source, target, channel)
        arrival = max(now + delay, self._arrivals.get(key, 0.0))
        self._arrivals[key] = arrival
        epoch = self._epochs.get(pair, 0)
        for _ in range(copies):
            self._clock.at(arrival, self._arrive, pair, epoch, target, function, arguments)

    def _arrive(
        self,
        pair: tuple[str, str],
        epoch: int,
        target: Process,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
    ) -> None:
        if self._epochs.get(pair, 0) == epoch:
            target.call(function, *arguments)

    def cut(self, one: str, other: str, seconds: float, *, resets: bool) -> None:
        """Block all messages between two processes for a while."""
        cut = _Cut(self._clock.now + seconds, resets)
        self._cuts[one, other] = self._cuts[other, one] = cut
        if resets:
            self.reset(one, other)

    def reset(self, one: str, other: str) -> None:
        """Drop all messages in transit between two processes."""
        for pair in ((one, other), (other, one)):
            self._epochs[pair] = self._epochs.get(pair, 0) + 1
