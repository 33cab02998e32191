"""A sequence in flight in a front end: its message, engine, timings and suspicion.

No clock: times are passed in with events.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from engine.shared.messages import AddRequest, RequestTiming
from server.router.route import Engine


class EnginePeriod(NamedTuple):
    """One period of a request on an engine; times in monotonic seconds of the front end."""

    engine: int
    sent: float
    left: float
    timing: RequestTiming | None
    """Queueing and compute times there; None if the engine reported none."""


class EngineTimes:
    """Accumulates the timings of a request that moves between engines.

    With the first output an engine reports how long the request queued and prefilled, and with the
    last one how long it decoded. If the request left an engine before that, the time since its
    first output here counts as decoding; without any output, all of it counts as queueing. Waiting
    for another engine is queueing.
    """

    __slots__ = ("_current_timing", "_decode", "_first_at", "_has_final_timing", "_preemptions",
                 "_prefill", "_queue", "_ran", "_sent", "_since", "engine",
                 "engine_periods")  # fmt: skip

    def __init__(self) -> None:
        self.engine = -1
        """Rank of the current or last engine; -1 before the first."""
        self._queue = self._prefill = self._decode = 0.0
        self._preemptions = 0
        self._current_timing: RequestTiming | None = None
        self._has_final_timing = False
        self._ran = False
        self._first_at = 0.0
        self._since: float | None = None
        self._sent: float | None = None
        """When it was sent to its current engine; None if unassigned."""
        self.engine_periods: list[EnginePeriod] = []
        """Completed periods on engines, in order."""

    def sent(self, engine: int, now: float) -> None:
        """Record that the request is sent to an engine."""
        self.left(now)
        self.engine = engine
        self._sent = now

    def record_timing(self, timing: RequestTiming, now: float, *, last: bool) -> None:
        """Record the timing in an engine's output; `last` if it ended the request."""
        if self._current_timing is None:
            self._first_at = now
        self._current_timing = timing
        self._has_final_timing = last
        self._ran = True

    def left(self, now: float) -> None:
        """Record that the request was unassigned from its engine."""
        timing = self._current_timing
        if timing is not None and not self._has_final_timing:
            decode = now - self._first_at
            timing = RequestTiming(timing.queue, timing.prefill, decode, timing.preemptions)
        if self._sent is not None:
            self.engine_periods.append(EnginePeriod(self.engine, self._sent, now, timing))
            self._sent = None
        if timing is not None:
            self._queue += timing.queue
            self._prefill += timing.prefill
            self._preemptions += timing.preemptions
            self._decode += timing.decode
        elif self._since is not None:
            self._queue += now - self._since
        self._current_timing = None
        self._since = now

    def ended(self, now: float) -> RequestTiming | None:
        """Return the totals of a finished request; None if no engine produced a token."""
        self.left(now)
        if not self._ran:
            return None
        return RequestTiming(self._queue, self._prefill, self._decode, self._preemptions)


_NONE: frozenset[Engine] = frozenset()


@dataclass(slots=True, eq=False)
class Suspicion:
    """Engine deaths that a request may have caused."""

    died_on: frozenset[Engine] = _NONE
    """Engines that died with the request in flight, for unknown reasons."""
    in_doubt: frozenset[Engine] = _NONE
    """Engines that it was moved away from and that may have died."""
    silent_on: frozenset[Engine] = _NONE
    """Engines that fell silent with it in flight; dead if other processes replace them."""
    exclusive_on: Engine | None = None
    """The engine that reported running this request alone."""
    tried_on: Engine | None = None
    """The engine that it was last sent to for a trial."""
    tries: int = 0
    """Engines that died for unknown reasons while the request waited there to run alone."""
    exclusive_deaths: int = 0
    """Engines that died while running it alone."""
    clearances: int = 0
    """Number of trials passed."""

    def error_message(self) -> str:
        """Return the client's error message if the request ends because of this."""
        deaths = len(self.died_on) + (self.exclusive_on is not None)
        if self.exclusive_on is not None:
            return (
                f"the request ended {deaths} engines, {self.exclusive_deaths} of them while it ran "
                "there alone: it must not be sent again"
            )
        return (
            f"the request was in flight on {deaths} engines that died and could not be run alone: "
            "it is the suspected cause and should not be sent again"
        )

    def left(self, engine: Engine, *, was_silent: bool) -> None:
        """Record that the request left an engine that is unreachable."""
        if was_silent:
            self.silent_on |= {engine}
        else:
            self.in_doubt |= {engine}

    def left_on(self, engine: Engine) -> bool:
        """Return whether it left that engine before the engine's fate was known."""
        return engine in self.in_doubt or engine in self.silent_on

    def engine_alive(self, engine: Engine) -> None:
        """Clear an engine that is alive: it was only unreachable."""
        if not (self.died_on or self.in_doubt or self.silent_on):
            return
        if self.left_on(engine) and self.exclusive_on == engine:
            self.exclusive_on = None
        self.clear_doubt(engine)
        self.died_on -= {engine}

    def clear_doubt(self, engine: Engine) -> None:
        """Clear the doubt about an engine whose end this request did not cause."""
        self.in_doubt -= {engine}
        self.silent_on -= {engine}

    def ended(self, engine: Engine, *, was_silent: bool) -> None:
        """Record an engine that has ended; one that had been silent may come back."""
        self.clear_doubt(engine)
        if was_silent:
            self.silent_on |= {engine}
        else:
            self.died_on |= {engine}
        if engine == self.tried_on and not was_silent:
            self.tries += 1
            self.tried_on = None

    def replaced(self, incarnations: Mapping[int, int]) -> None:
        """Count silent engines as dead if other processes have replaced them."""
        for rank, incarnation in self.silent_on:
            if incarnations.get(rank, incarnation) != incarnation:
                self.ended((rank, incarnation), was_silent=False)

    def cleared(self) -> None:
        """Reset after a passed trial: the engines died for other reasons."""
        self.died_on = _NONE
        self.exclusive_on = self.tried_on = None
        self.tries = self.exclusive_deaths = 0
        self.clearances += 1


class Prefill(enum.Enum):
    """Progress of a request whose prompt is computed separately (`server.router.split`)."""

    NONE = enum.auto()
    """Not split, or on the engine that answers it."""
    RUNNING = enum.auto()
    """Its engine only computes the prompt."""
    DONE = enum.auto()
    """The prefill engine is done; another engine is to answer."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request that the front end owns until it ends, regardless of which engines run it.

    Prompt, sampling parameters and all tokens so far stay here, so that another engine can continue
    if one dies.
    """

    message: AddRequest
    """The request message; its id is the one under which it was last sent."""
    pinned_rank: int | None = None
    """The only engine that may run it; None if any may."""
    engine: Engine | None = None
    """Engine process that runs it; None if unassigned."""
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens received so far, from all engines that ran it."""
    expected_cached: int | None = None
    """Tokens expected to be cached on its engine, until the engine reports the actual number; None
    if unknown."""
    prefill: Prefill = Prefill.NONE
    prefilled_by: Engine | None = None
    """The engine that successfully computed its prompt."""
    cached_at_prefill: int | None = None
    """Cached prompt tokens at prefill; at the first one if there were several."""
    times: EngineTimes = field(default_factory=EngineTimes)
    suspicion: Suspicion = field(default_factory=Suspicion)
    waiting_since: float | None = None
    """Start of the wait for the current engine; None if it did not wait."""

    @property
    def id(self) -> int:
        return self.message.id

    @property
    def rank(self) -> int:
        """Rank of the engine that runs it; -1 if unassigned."""
        return -1 if self.engine is None else self.engine[0]

    @property
    def shown_token_ids(self) -> list[int]:
        """The prompt with each image's first placeholder token replaced by a hash of the image."""
        message = self.message
        if not message.encoder_inputs:
            return message.prompt_token_ids
        shown = list(message.prompt_token_ids)
        for each in message.encoder_inputs:
            shown[each.position] = int.from_bytes(each.digest[:7])
        return shown

    def to_send(self, wave: int) -> AddRequest:
        """Return the message to send to an engine, including the tokens so far."""
        message = self.message
        if not self.output_token_ids:
            return message if message.wave == wave else msgspec.structs.replace(message, wave=wave)
        sampling = message.sampling
        if sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            message, wave=wave, sampling=sampling, output_token_ids=list(self.output_token_ids)
        )
