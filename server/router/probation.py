"""Suspects of one front end: one at a time is tried, the others wait for their turn.

Innocent requests become suspects too, when they shared engines with whatever killed these. So
nobody is answered with an error for that: a suspect is computed alone, and what happens then
tells.
"""

from collections.abc import Iterable

import msgspec

from engine.shared.messages import EngineStats
from server.router.token_stream import RequestStream

STEPS_ALONE = 8
"""Steps with a draw that a suspect is computed alone: more than were lost of it with its engine."""

STEPS_GROWTH = 4
"""How many times as long a request is tried that had been cleared before, up to twice."""

CONVICTING_DEATHS = 2
"""Engines that have to die while they run the same suspect alone: one may have been killed by
somebody who restarts engines, or by its machine."""

MAX_TRIES = 3
"""Engines that may die, nobody knows why, while the same suspect waits there to run alone."""


class Probation:
    """Who is suspected, and whose turn it is to run alone.

    Args:
        max_resumes: how many engines may die with a request before it is suspected.
        patience: seconds after which a suspect that is neither cleared nor convicted is given up.
    """

    def __init__(self, max_resumes: int, patience: float) -> None:
        self.on_trial: RequestStream | None = None
        """The suspect that was sent to an engine, or is as soon as there is one."""
        self._max_resumes = max_resumes
        self._since: dict[RequestStream, float] = {}  # in the order of their turns
        self._patience = patience
        self._rests = False

    def __contains__(self, stream: RequestStream) -> bool:
        return stream in self._since

    def __len__(self) -> int:
        return len(self._since)

    def is_suspect(self, stream: RequestStream) -> bool:
        """Whether too many engines died with a request for it to run beside others."""
        return len(stream.suspicion.died_on) > self._max_resumes

    def may_run(self, stream: RequestStream) -> bool:
        """Whether a request may be sent to an engine: it is on trial, or cannot become a suspect.

        One that would be a suspect if an engine that it left has died waits to know.
        """
        suspicion = stream.suspicion
        possible = len(suspicion.died_on) + len(suspicion.in_doubt)
        return possible <= self._max_resumes or stream is self.on_trial

    def add(self, stream: RequestStream, now: float) -> None:
        """Let a suspect wait for its turn."""
        self._since.setdefault(stream, now)

    def next(self) -> RequestStream | None:
        """Begin the next trial if it is time for one, and return who is tried.

        Whoever left an engine that may have died waits until that is known.
        """
        if self.on_trial is not None or self._rests:
            return None
        stream = next((each for each in self._since if not each.suspicion.in_doubt), None)
        if stream is not None:
            steps = STEPS_ALONE * STEPS_GROWTH ** min(stream.suspicion.clearances, 2)
            stream.request = msgspec.structs.replace(stream.request, alone=steps)
            stream.suspicion.alone_on = None
            self.on_trial = stream
        return stream

    def broke_off(self, stream: RequestStream) -> None:
        """A suspect has lost its engine: others are tried first unless it ran there alone."""
        if not stream.suspicion.deaths_alone:
            self._since[stream] = self._since.pop(stream)
        if self.on_trial is stream:
            self.on_trial = None

    def watch(self, stats: EngineStats) -> None:
        """An engine says whom it runs alone: the trial begins there, or is over and ended well."""
        stream = self.on_trial
        if stream is None or not stream.runs_on(stats.rank, stats.incarnation):
            return
        engine = (stats.rank, stats.incarnation)
        if stats.alone == stream.request.id:
            stream.suspicion.alone_on = engine
        elif stream.suspicion.alone_on == engine:
            self._acquit(stream)
            stream.suspicion.cleared()

    def convicted(self, stream: RequestStream, in_flight: Iterable[RequestStream]) -> None:
        """A request is the reason for the deaths that others are suspected of, too.

        Nobody runs for that before the next tick: others of the same client's request are closed
        by then.
        """
        self.drop(stream)
        self._rests = True
        for other in in_flight:
            if other is not stream:
                other.suspicion.died_on -= stream.suspicion.died_on

    def _acquit(self, stream: RequestStream) -> None:
        self.drop(stream)
        stream.request = msgspec.structs.replace(stream.request, alone=0)

    def drop(self, stream: RequestStream) -> None:
        """The request has ended, or is a suspect no more."""
        self._since.pop(stream, None)
        if self.on_trial is stream:
            self.on_trial = None

    def overdue(self, now: float) -> list[RequestStream]:
        """Return the suspects that have waited too long."""
        return [each for each, since in self._since.items() if now - since > self._patience]

    def tick(self) -> list[RequestStream]:
        """Time has passed; return those who wait for their turn and need it no more."""
        self._rests = False
        waiting = [each for each in self._since if each is not self.on_trial]
        acquitted = [each for each in waiting if not self.is_suspect(each)]
        for each in acquitted:
            self._acquit(each)
        return acquitted
