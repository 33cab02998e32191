"""What the engine writes: one message per step and front end, and stats to the coordinator.

The stepping thread writes itself. Another thread would cost more than the writing: the two would
take the interpreter's lock from each other a dozen times a step, and a kernel that runs the woken
thread next can keep everything else from their processor for a tenth of a second.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol

import zmq

from engine.core.front_ends import CoreStep
from engine.shared.messages import (
    EngineDead,
    EngineOutput,
    EngineReport,
    EngineStats,
    StepOutputs,
    encode,
)
from engine.shared.transport import LARGEST_FRAME, Transport, frames_of
from engine.shared.version import OUTPUTS_IN_FRAMES

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.025
"""Minimum seconds between two stats to the coordinator while an engine keeps running."""

LATE_INTERVAL = 0.1
"""Seconds after which held-back stats are sent that a long step has kept from being replaced."""


class Outlet(Protocol):
    """Where an engine's loop sends everything, without waiting."""

    def say(self, step: CoreStep) -> None:
        """Tell front ends and the coordinator what a step has to say."""

    def report(self, report: EngineReport) -> None:
        """Tell the coordinator something."""


class StatsThrottle:
    """Decides which stats the coordinator gets: at once when work begins or ends, else rarely.

    Work has ended when two stats in a row have none: with short requests the next usually begins
    before the end of one could be of use. The newest stats are never lost: if held back, they are
    due after the interval.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._last_sent = float("-inf")
        self._said_busy = False
        self._idle_in_a_row = 0
        self._held: EngineStats | None = None

    def offer(self, stats: EngineStats, now: float) -> EngineStats | None:
        """Take new stats; return what to send now."""
        busy = stats.waiting + stats.running > 0
        self._held = stats
        self._idle_in_a_row = 0 if busy else self._idle_in_a_row + 1
        news = not self._said_busy if busy else self._said_busy and self._idle_in_a_row > 1
        if news or now - self._last_sent >= self._interval:
            return self.take(now)
        return None

    def take(self, now: float) -> EngineStats | None:
        """Return what is held back, if anything."""
        stats, self._held = self._held, None
        if stats is not None:
            self._last_sent = now
            self._said_busy = stats.waiting + stats.running > 0
        return stats

    @property
    def holds(self) -> bool:
        """Whether stats are held back."""
        return self._held is not None

    def wait(self, now: float) -> float | None:
        """Return the seconds until held stats are due; None when nothing is held."""
        if self._held is None:
            return None
        return max(0.0, self._last_sent + self._interval - now)


_Arguments = ParamSpec("_Arguments")


def _one_at_a_time(
    act: Callable[Concatenate["Sender", _Arguments], None],
) -> Callable[Concatenate["Sender", _Arguments], None]:
    """Let a method be called by any thread; what fails in it is logged."""

    @wraps(act)
    def write(sender: "Sender", /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> None:
        with sender._lock:
            try:
                act(sender, *arguments, **named)
            except Exception:
                # One thing that cannot be sent must not silence the engine.
                logger.exception("could not %s", act.__name__.replace("_", " "))

    return write


class Sender:
    """Writes what it is given at once; a thread of its own sends stats that were held back.

    Nothing here waits for a reader: sockets queue without a limit, and a front end that goes takes
    its queue with it.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._lock = threading.Lock()  # sockets may change threads, but serve one at a time
        self._coordinator: zmq.Socket[bytes] | None = None
        self._front_ends: dict[int, zmq.Socket[bytes]] = {}
        self._take_frames: set[int] = set()
        self._throttle = StatsThrottle(STATS_INTERVAL)
        self._stopped = threading.Event()
        # An idle engine wakes for nothing: its thread sleeps until stats are held back.
        self._holds = threading.Event()
        self._thread = threading.Thread(target=self._send_late, name="late-stats", daemon=True)

    def start(self) -> None:
        """Start the thread that sends stats which a long step keeps from being replaced."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Send what is held back and close all sockets, each once its queue is empty."""
        with self._lock:
            self._stopped.set()
            self._holds.set()
        self._thread.join(timeout)
        with self._lock:
            self._report(self._throttle.take(self._clock()))
            for each in [*self._front_ends.values(), self._coordinator]:
                if each is not None:
                    each.close(linger=500)
            self._front_ends, self._coordinator = {}, None

    # -- what there is to say --------------------------------------------------------------------

    @_one_at_a_time
    def say(self, step: CoreStep) -> None:
        """Send what a step has to say to each front end, and its stats to the coordinator."""
        for index, of_front_end in step.outputs.items():
            self._send(index, StepOutputs(step.stats, of_front_end))
        for index, result in step.utility_results:
            self._send(index, result)
        for index, blocks in step.blocks:
            self._send(index, blocks)
        self._report(self._throttle.offer(step.stats, self._clock()))
        if self._throttle.holds and not self._holds.is_set():
            self._holds.set()

    @_one_at_a_time
    def report(self, report: EngineReport) -> None:
        """Tell the coordinator something."""
        self._report(report)

    @_one_at_a_time
    def last_words(self, message: EngineDead) -> None:
        """Tell all front ends that this engine cannot go on."""
        for index in self._front_ends:
            self._send(index, message)

    def send_held(self) -> None:
        """Send the stats that were held back, if they are due."""
        with self._lock:
            now = self._clock()
            if self._throttle.wait(now) == 0:
                self._report(self._throttle.take(now))
            if not self._throttle.holds and not self._stopped.is_set():
                self._holds.clear()

    @property
    def holds(self) -> bool:
        """Whether stats are held back, which `send_held` has to look at."""
        return self._throttle.holds

    # -- ways, opened and closed by the receiver -------------------------------------------------

    @_one_at_a_time
    def connect_coordinator(self, address: str) -> None:
        """Open the way to the coordinator, instead of the one before."""
        if self._coordinator is not None:
            self._coordinator.close(linger=0)
        self._coordinator = self._transport.connect(zmq.PUSH, address)

    @_one_at_a_time
    def connect_front_end(self, index: int, address: str, protocol: int) -> None:
        """Open the way to a front end that speaks this protocol."""
        self._front_ends[index] = self._transport.connect(zmq.PUSH, address)
        self._take_frames.discard(index)
        if protocol >= OUTPUTS_IN_FRAMES:
            self._take_frames.add(index)

    @_one_at_a_time
    def disconnect_front_end(self, index: int) -> None:
        """A front end has gone: drop what has not been sent to it."""
        self._front_ends.pop(index).close(linger=0)

    def _send_late(self) -> None:
        while self._holds.wait() and not self._stopped.wait(LATE_INTERVAL):
            self.send_held()

    def _send(self, index: int, message: EngineOutput) -> None:
        front_end = self._front_ends.get(index)
        if front_end is not None:
            data = encode(message)
            if len(data) > LARGEST_FRAME and index in self._take_frames:
                front_end.send_multipart(frames_of(data))
            else:
                front_end.send(data)

    def _report(self, report: EngineReport | None) -> None:
        if report is not None and self._coordinator is not None:
            self._coordinator.send(encode(report))
