"""How long a request took in the engines that ran it. No clock: events come in with the time."""

from typing import NamedTuple

from engine.shared.messages import RequestTiming


class EngineVisit(NamedTuple):
    """One stay of a request in an engine; times in monotonic seconds of the front end."""

    engine: int
    sent: float
    left: float
    timing: RequestTiming | None
    """How long it queued and was computed there; None if the engine said nothing of it."""


class EngineTimes:
    """Adds up the parts of a request that moves from engine to engine.

    An engine says with its first output how long the request queued there and was prefilled, and
    with its last one how long it decoded. Of an engine that the request left before that, whatever
    passed here since its first output counts as decoding; if it said nothing at all, as queuing.
    To wait for another engine is to queue.
    """

    __slots__ = ("_decode", "_ended_here", "_first_at", "_here", "_preemptions", "_prefill",
                 "_queue", "_ran", "_sent", "_since", "engine", "visits")  # fmt: skip

    def __init__(self) -> None:
        self.engine = -1
        """Rank of the engine that runs the request, or ran it last; -1 before the first."""
        self._queue = self._prefill = self._decode = 0.0
        self._preemptions = 0
        self._here: RequestTiming | None = None
        self._ended_here = False
        self._ran = False
        self._first_at = 0.0
        self._since: float | None = None
        self._sent: float | None = None
        """When it was sent to the engine that it is in; None: it is in none."""
        self.visits: list[EngineVisit] = []
        """Its stays in engines that are over, in their order."""

    def sent(self, engine: int, now: float) -> None:
        """The request goes to an engine."""
        self.left(now)
        self.engine = engine
        self._sent = now

    def said(self, timing: RequestTiming, now: float, *, last: bool) -> None:
        """An output of the engine came with its times; `last` if the request ended with it."""
        if self._here is None:
            self._first_at = now
        self._here = timing
        self._ended_here = last
        self._ran = True

    def left(self, now: float) -> None:
        """The engine was lost, or what it does from now on is not the request's any more."""
        here = self._here
        if here is not None and not self._ended_here:
            decode = now - self._first_at
            here = RequestTiming(here.queue, here.prefill, decode, here.preemptions)
        if self._sent is not None:
            self.visits.append(EngineVisit(self.engine, self._sent, now, here))
            self._sent = None
        if here is not None:
            self._queue += here.queue
            self._prefill += here.prefill
            self._preemptions += here.preemptions
            self._decode += here.decode
        elif self._since is not None:
            self._queue += now - self._since
        self._here = None
        self._since = now

    def ended(self, now: float) -> RequestTiming | None:
        """Return the sums of a request that is over; None if no engine gave it a token."""
        self.left(now)
        if not self._ran:
            return None
        return RequestTiming(self._queue, self._prefill, self._decode, self._preemptions)
