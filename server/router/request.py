"""A sequence that a front end has in flight: what it is, where it runs, how long, its suspicion.

No clock: events come in with the time.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from engine.shared.messages import AddRequest, RequestTiming
from server.router.route import Engine


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


_NONE: frozenset[Engine] = frozenset()


@dataclass(slots=True, eq=False)
class Suspicion:
    """The deaths of engines that one request may have caused."""

    died_on: frozenset[Engine] = _NONE
    """Engines that died with the request in flight, for an unknown reason."""
    in_doubt: frozenset[Engine] = _NONE
    """Engines that it was moved away from and that may have died."""
    silent_on: frozenset[Engine] = _NONE
    """Engines that fell silent with it in flight: they died if other processes replace them."""
    alone_on: Engine | None = None
    """The engine that said that it runs this request alone."""
    tried_on: Engine | None = None
    """The engine that it was last sent to, to run alone."""
    tries: int = 0
    """Engines that died for an unknown reason while the request waited there to run alone."""
    deaths_alone: int = 0
    """Engines that died while they ran it alone."""
    clearances: int = 0
    """How often it has run alone without harm."""

    def says(self) -> str:
        """Return what the client is told when the request ends for it."""
        deaths = len(self.died_on) + (self.alone_on is not None)
        if self.alone_on is not None:
            return (
                f"the request ended {deaths} engines, {self.deaths_alone} of them while it ran "
                "there alone: it must not be sent again"
            )
        return (
            f"the request was in flight on {deaths} engines that died and could not be run alone: "
            "it is suspected to be the reason and should not be sent again"
        )

    def left(self, engine: Engine, *, was_silent: bool) -> None:
        """The request leaves an engine that is out of reach."""
        if was_silent:
            self.silent_on |= {engine}
        else:
            self.in_doubt |= {engine}

    def left_on(self, engine: Engine) -> bool:
        """Whether it left that engine before it was known whether the engine had died."""
        return engine in self.in_doubt or engine in self.silent_on

    def heard(self, engine: Engine) -> None:
        """An engine is alive: it was only out of reach."""
        if not (self.died_on or self.in_doubt or self.silent_on):
            return
        if self.left_on(engine) and self.alone_on == engine:
            self.alone_on = None
        self.excused(engine)
        self.died_on -= {engine}

    def excused(self, engine: Engine) -> None:
        """This request did not cause what happened to an engine."""
        self.in_doubt -= {engine}
        self.silent_on -= {engine}

    def ended(self, engine: Engine, *, was_silent: bool) -> None:
        """An engine has gone; one that had been silent may come back."""
        self.excused(engine)
        if was_silent:
            self.silent_on |= {engine}
        else:
            self.died_on |= {engine}
        if engine == self.tried_on and not was_silent:
            self.tries += 1
            self.tried_on = None

    def replaced(self, incarnations: Mapping[int, int]) -> None:
        """Engines that fell silent have died if other processes replaced them."""
        for rank, incarnation in self.silent_on:
            if incarnations.get(rank, incarnation) != incarnation:
                self.ended((rank, incarnation), was_silent=False)

    def cleared(self) -> None:
        """It has run alone without harm: the engines died for other reasons."""
        self.died_on = _NONE
        self.alone_on = self.tried_on = None
        self.tries = self.deaths_alone = 0
        self.clearances += 1


class Prefill(enum.Enum):
    """How far a request is with having its prompt computed elsewhere (`server.router.split`)."""

    NONE = enum.auto()
    """It is not, or it is on the engine that answers it."""
    RUNS = enum.auto()
    """Its engine does that, and nothing else."""
    OVER = enum.auto()
    """That engine has said that it is done: another one is to answer."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request that the front end owns until it ends, whichever engines run it.

    Prompt, sampling parameters and all tokens so far stay here, so that another engine can continue
    if one dies.
    """

    message: AddRequest
    """What was asked for; its id is the one under which the request was sent last."""
    pinned_rank: int | None = None
    """The only engine that may run it; None: any may."""
    engine: Engine | None = None
    """The engine process that runs it; None: it waits for one."""
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens received so far, from all engines that ran it."""
    expected_cached: int | None = None
    """Tokens that its engine is expected to have cached, until it says how many it had; None:
    nothing is known of that."""
    prefill: Prefill = Prefill.NONE
    prefilled_by: Engine | None = None
    """The engine that has computed its prompt, if it succeeded."""
    cached_at_prefill: int | None = None
    """Prompt tokens that it had cached, the first of them if there were several."""
    times: EngineTimes = field(default_factory=EngineTimes)
    suspicion: Suspicion = field(default_factory=Suspicion)
    waited_since: float | None = None
    """When it began to wait for the engine that it was sent to last; None: it did not wait."""

    @property
    def id(self) -> int:
        return self.message.id

    @property
    def rank(self) -> int:
        """Rank of the engine that runs it; -1 without one."""
        return -1 if self.engine is None else self.engine[0]

    @property
    def shown_token_ids(self) -> list[int]:
        """The prompt in which numbers of their own stand for images: their tokens are all alike."""
        message = self.message
        if not message.encoder_inputs:
            return message.prompt_token_ids
        shown = list(message.prompt_token_ids)
        for each in message.encoder_inputs:
            shown[each.position] = int.from_bytes(each.digest[:7])
        return shown

    def to_send(self, wave: int) -> AddRequest:
        """Return the request as an engine has to take it (over): with the tokens so far."""
        message = self.message
        if not self.output_token_ids:
            return message if message.wave == wave else msgspec.structs.replace(message, wave=wave)
        sampling = message.sampling
        if sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            message, wave=wave, sampling=sampling, output_token_ids=list(self.output_token_ids)
        )
