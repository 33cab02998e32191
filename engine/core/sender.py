"""Sends an engine's messages: one per step and front end, and stats to the coordinator.

Messages are sent from the stepping thread. A separate thread would cost more than the sending: the
two would contend for the GIL a dozen times per step, and a kernel that schedules the woken thread
first can starve everything else on that CPU for a tenth of a second.
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
"""Seconds after which held-back stats are sent if a long step delays newer ones."""


class Outlet(Protocol):
    """Destination of an engine loop's messages; methods do not block."""

    def send_step(self, step: CoreStep) -> None:
        """Send a step's messages to front ends and its stats to the coordinator."""

    def report(self, report: EngineReport) -> None:
        """Send a report to the coordinator."""


class StatsThrottle:
    """Rate-limits stats to the coordinator, except when work begins or ends.

    Work has ended when two successive stats show none: with short requests the next one usually
    begins before the news of an end would be of use. The newest stats are never lost: if held back,
    they are due after the interval.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._last_sent = float("-inf")
        self._sent_busy = False
        self._idle_in_a_row = 0
        self._pending: EngineStats | None = None

    def offer(self, stats: EngineStats, now: float) -> EngineStats | None:
        """Process new stats; return the stats to send now, if any."""
        busy = stats.waiting + stats.running > 0
        self._pending = stats
        self._idle_in_a_row = 0 if busy else self._idle_in_a_row + 1
        is_transition = not self._sent_busy if busy else self._sent_busy and self._idle_in_a_row > 1
        if is_transition or now - self._last_sent >= self._interval:
            return self.take(now)
        return None

    def take(self, now: float) -> EngineStats | None:
        """Return and clear the held-back stats, if any."""
        stats, self._pending = self._pending, None
        if stats is not None:
            self._last_sent = now
            self._sent_busy = stats.waiting + stats.running > 0
        return stats

    @property
    def has_pending(self) -> bool:
        """Whether stats are held back."""
        return self._pending is not None

    def wait(self, now: float) -> float | None:
        """Return the seconds until held-back stats are due; None if there are none."""
        if self._pending is None:
            return None
        return max(0.0, self._last_sent + self._interval - now)


_Arguments = ParamSpec("_Arguments")


def _serialized(
    method: Callable[Concatenate["Sender", _Arguments], None],
) -> Callable[Concatenate["Sender", _Arguments], None]:
    """Make a method callable from any thread, and log its exceptions."""

    @wraps(method)
    def write(sender: "Sender", /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> None:
        with sender._lock:
            try:
                method(sender, *arguments, **named)
            except Exception:
                # A single message that cannot be sent must not stop the engine.
                logger.exception("could not %s", method.__name__.replace("_", " "))

    return write


class Sender:
    """Sends messages immediately; a background thread sends held-back stats.

    Never blocks: sockets queue without a limit, and a front end that leaves takes its queue with
    it.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._lock = threading.Lock()  # sockets may change threads, but allow one at a time
        self._coordinator: zmq.Socket[bytes] | None = None
        self._front_ends: dict[int, zmq.Socket[bytes]] = {}
        self._accepts_frames: set[int] = set()
        self._throttle = StatsThrottle(STATS_INTERVAL)
        self._stopped = threading.Event()
        # An idle engine causes no wake-ups: its thread sleeps until stats are held back.
        self._has_pending = threading.Event()
        self._thread = threading.Thread(target=self._send_late, name="late-stats", daemon=True)

    def start(self) -> None:
        """Start the thread that sends held-back stats during long steps."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Send held-back stats and close all sockets, each once its queue is empty."""
        with self._lock:
            self._stopped.set()
            self._has_pending.set()
        self._thread.join(timeout)
        with self._lock:
            self._report(self._throttle.take(self._clock()))
            for each in [*self._front_ends.values(), self._coordinator]:
                if each is not None:
                    each.close(linger=500)
            self._front_ends, self._coordinator = {}, None

    # -- messages --------------------------------------------------------------------------------

    @_serialized
    def send_step(self, step: CoreStep) -> None:
        """Send a step's messages to each front end, and its stats to the coordinator."""
        for index, of_front_end in step.outputs.items():
            self._send(index, StepOutputs(step.stats, of_front_end))
        for index, result in step.utility_results:
            self._send(index, result)
        for index, blocks in step.blocks:
            self._send(index, blocks)
        self._report(self._throttle.offer(step.stats, self._clock()))
        if self._throttle.has_pending and not self._has_pending.is_set():
            self._has_pending.set()

    @_serialized
    def report(self, report: EngineReport) -> None:
        """Send a report to the coordinator."""
        self._report(report)

    @_serialized
    def send_failure(self, message: EngineDead) -> None:
        """Notify all front ends that this engine has failed."""
        for index in self._front_ends:
            self._send(index, message)

    def send_pending(self) -> None:
        """Send the held-back stats if they are due."""
        with self._lock:
            now = self._clock()
            if self._throttle.wait(now) == 0:
                self._report(self._throttle.take(now))
            if not self._throttle.has_pending and not self._stopped.is_set():
                self._has_pending.clear()

    @property
    def has_pending(self) -> bool:
        """Whether stats are held back, for which `send_pending` has to be called."""
        return self._throttle.has_pending

    # -- connections, opened and closed by the receiver ------------------------------------------

    @_serialized
    def connect_coordinator(self, address: str) -> None:
        """Connect to the coordinator, replacing an earlier connection."""
        if self._coordinator is not None:
            self._coordinator.close(linger=0)
        self._coordinator = self._transport.connect(zmq.PUSH, address)

    @_serialized
    def connect_front_end(self, index: int, address: str, protocol: int) -> None:
        """Connect to a front end that uses this protocol."""
        self._front_ends[index] = self._transport.connect(zmq.PUSH, address)
        self._accepts_frames.discard(index)
        if protocol >= OUTPUTS_IN_FRAMES:
            self._accepts_frames.add(index)

    @_serialized
    def disconnect_front_end(self, index: int) -> None:
        """Close the connection to a front end that has left, dropping unsent messages."""
        self._front_ends.pop(index).close(linger=0)

    def _send_late(self) -> None:
        while self._has_pending.wait() and not self._stopped.wait(LATE_INTERVAL):
            self.send_pending()

    def _send(self, index: int, message: EngineOutput) -> None:
        front_end = self._front_ends.get(index)
        if front_end is not None:
            data = encode(message)
            if len(data) > LARGEST_FRAME and index in self._accepts_frames:
                front_end.send_multipart(frames_of(data))
            else:
                front_end.send(data)

    def _report(self, report: EngineReport | None) -> None:
        if report is not None and self._coordinator is not None:
            self._coordinator.send(encode(report))
