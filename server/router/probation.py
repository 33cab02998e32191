"""Suspects of one front end: one at a time is tried, the others wait for their turn.

Innocent requests become suspects too, when they shared engines with whatever killed these. So
nobody is answered with an error for that: a suspect is computed alone, and what happens then
tells.
"""

from collections.abc import Iterable

import msgspec

from engine.shared.messages import EngineStats
from server.router.request import RoutedRequest

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
        self.on_trial: RoutedRequest | None = None
        """The suspect that was sent to an engine, or is as soon as there is one."""
        self.suspects: dict[RoutedRequest, float] = {}
        """Since when each is one, in the order of their turns."""
        self._max_resumes = max_resumes
        self._patience = patience
        self._rests = False

    def is_suspect(self, request: RoutedRequest) -> bool:
        """Whether too many engines died with a request for it to run beside others."""
        return len(request.suspicion.died_on) > self._max_resumes

    def may_run(self, request: RoutedRequest) -> bool:
        """Whether a request may be sent to an engine: it is on trial, or cannot become a suspect.

        One that would be a suspect if an engine that it left has died waits to know.
        """
        suspicion = request.suspicion
        possible = len(suspicion.died_on) + len(suspicion.in_doubt)
        return possible <= self._max_resumes or request is self.on_trial

    def add(self, request: RoutedRequest, now: float) -> None:
        """Let a suspect wait for its turn."""
        self.suspects.setdefault(request, now)

    def next(self) -> RoutedRequest | None:
        """Begin the next trial if it is time for one, and return who is tried.

        Whoever left an engine that may have died waits until that is known.
        """
        if self.on_trial is not None or self._rests:
            return None
        request = next((each for each in self.suspects if not each.suspicion.in_doubt), None)
        if request is not None:
            steps = STEPS_ALONE * STEPS_GROWTH ** min(request.suspicion.clearances, 2)
            request.message = msgspec.structs.replace(request.message, alone=steps)
            request.suspicion.alone_on = None
            self.on_trial = request
        return request

    def broke_off(self, request: RoutedRequest) -> None:
        """A suspect has lost its engine: others are tried first unless it ran there alone."""
        if not request.suspicion.deaths_alone:
            self.suspects[request] = self.suspects.pop(request)
        if self.on_trial is request:
            self.on_trial = None

    def watch(self, stats: EngineStats) -> None:
        """An engine says whom it runs alone: the trial begins there, or is over and ended well."""
        request = self.on_trial
        engine = (stats.rank, stats.incarnation)
        if request is None or request.engine != engine:
            return
        if stats.alone == request.id:
            request.suspicion.alone_on = engine
        elif request.suspicion.alone_on == engine:
            self._acquit(request)
            request.suspicion.cleared()

    def convicted(self, request: RoutedRequest, in_flight: Iterable[RoutedRequest]) -> None:
        """A request is the reason for the deaths that others are suspected of, too.

        Nobody runs for that before the next tick: others of the same client's request are closed
        by then.
        """
        self.drop(request)
        self._rests = True
        for other in in_flight:
            if other is not request:
                other.suspicion.explained(request.suspicion.died_on)

    def _acquit(self, request: RoutedRequest) -> None:
        self.drop(request)
        request.message = msgspec.structs.replace(request.message, alone=0)

    def drop(self, request: RoutedRequest) -> None:
        """The request has ended, or is a suspect no more."""
        self.suspects.pop(request, None)
        if self.on_trial is request:
            self.on_trial = None

    def overdue(self, now: float) -> list[RoutedRequest]:
        """Return the suspects that have waited too long."""
        return [each for each, since in self.suspects.items() if now - since > self._patience]

    def tick(self) -> list[RoutedRequest]:
        """Time has passed; return those who wait for their turn and need it no more."""
        self._rests = False
        waiting = [each for each in self.suspects if each is not self.on_trial]
        acquitted = [each for each in waiting if not self.is_suspect(each)]
        for each in acquitted:
            self._acquit(each)
        return acquitted
