"""The engine's writing thread: one message per step and front end, and stats to the coordinator.

It owns every socket that the engine writes results to, so that encoding and sending never hold
up the next step for longer than the GIL demands.
"""

import logging
import threading
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import zmq

from engine.messages import (
    EngineDead,
    EngineReport,
    EngineStats,
    RequestOutput,
    StartWave,
    StepOutputs,
    UtilityResult,
    WaveComplete,
    encode,
)
from engine.transport import Transport

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.025
"""Least seconds between two stats to the coordinator while an engine keeps running."""


@dataclass(frozen=True)
class ConnectCoordinator:
    """Open the way to the coordinator."""

    address: str


@dataclass(frozen=True)
class ConnectFrontEnd:
    """Open the way to a front end."""

    index: int
    address: str


@dataclass(frozen=True)
class DisconnectFrontEnd:
    """A front end has gone: drop what has not been sent to it."""

    index: int


@dataclass(frozen=True)
class StepDone:
    """What a step produced, by front end; without outputs only the stats are news."""

    stats: EngineStats
    outputs: dict[int, list[RequestOutput]]


@dataclass(frozen=True)
class UtilityDone:
    """The answer to one front end's utility call."""

    front_end: int
    result: UtilityResult


@dataclass(frozen=True)
class Dying:
    """Tell everybody that this engine cannot go on."""

    message: EngineDead


@dataclass(frozen=True)
class Flush:
    """Send what is queued, then end the thread."""


SenderItem = (
    ConnectCoordinator
    | ConnectFrontEnd
    | DisconnectFrontEnd
    | StepDone
    | UtilityDone
    | Dying
    | EngineReport
    | Flush
)


class StatsThrottle:
    """Decides which stats the coordinator gets: at once when work began or ended, else seldom.

    The newest stats are never lost: what was held back is due after the interval.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._last_sent = float("-inf")
        self._was_busy: bool | None = None
        self._held: EngineStats | None = None

    def offer(self, stats: EngineStats, now: float) -> EngineStats | None:
        """Take new stats; return what to send now."""
        busy = stats.waiting + stats.running > 0
        self._held = stats
        if busy != self._was_busy or now - self._last_sent >= self._interval:
            self._was_busy = busy
            return self.take(now)
        return None

    def take(self, now: float) -> EngineStats | None:
        """Return what is held back, if anything."""
        stats, self._held = self._held, None
        if stats is not None:
            self._last_sent = now
        return stats

    def wait(self, now: float) -> float | None:
        """Return the seconds until held stats are due; None when nothing is held."""
        if self._held is None:
            return None
        return max(0.0, self._last_sent + self._interval - now)


class Sender:
    """Runs the writing thread from `start` to `stop`."""

    def __init__(self, transport: Transport) -> None:
        self.outbox: SimpleQueue[SenderItem] = SimpleQueue()
        self._transport = transport
        self._coordinator: zmq.Socket[bytes] | None = None
        self._front_ends: dict[int, zmq.Socket[bytes]] = {}
        self._throttle = StatsThrottle(STATS_INTERVAL)
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Send what is queued and wait for the thread."""
        self.outbox.put(Flush())
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            try:
                item = self.outbox.get(timeout=self._throttle.wait(time.monotonic()))
            except Empty:
                self._report(self._throttle.take(time.monotonic()))
                continue
            if isinstance(item, Flush):
                break
            try:
                self._handle(item)
            except Exception:
                # One item that cannot be sent must not silence the engine.
                logger.exception("could not send %s", type(item).__name__)
        self._report(self._throttle.take(time.monotonic()))
        for each in [*self._front_ends.values(), self._coordinator]:
            if each is not None:
                each.close(linger=500)

    def _handle(self, item: SenderItem) -> None:
        match item:
            case StepDone(stats, outputs):
                for index, of_front_end in outputs.items():
                    self._send(index, encode(StepOutputs(stats, of_front_end)))
                self._report(self._throttle.offer(stats, time.monotonic()))
            case UtilityDone(front_end, result):
                self._send(front_end, encode(result))
            case ConnectCoordinator(address):
                self._coordinator = self._transport.connect(zmq.PUSH, address)
            case ConnectFrontEnd(index, address):
                self._front_ends[index] = self._transport.connect(zmq.PUSH, address)
            case DisconnectFrontEnd(index):
                self._front_ends.pop(index).close(linger=0)
            case Dying(message):
                for each in self._front_ends.values():
                    each.send(encode(message))
            case EngineStats() | WaveComplete() | StartWave():
                self._report(item)
            case Flush():
                pass  # ends the loop before it gets here

    def _send(self, index: int, frame: bytes) -> None:
        front_end = self._front_ends.get(index)
        if front_end is not None:
            front_end.send(frame)

    def _report(self, report: EngineReport | None) -> None:
        if report is not None and self._coordinator is not None:
            self._coordinator.send(encode(report))
