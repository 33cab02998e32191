"""Requests suspected of killing engines: one at a time is tried, the others wait for their turn.

Innocent requests become suspects too if they shared engines with the culprit. So being suspected is
not an error: a suspect runs alone, and the result shows whether it kills engines.
"""

from collections.abc import Iterable

import msgspec

from engine.shared.messages import EngineStats
from server.router.request import RoutedRequest

STEPS_ALONE = 8
"""Sampling steps for which a suspect runs alone: more than were lost with its engine."""

STEPS_GROWTH = 4
"""Factor by which each earlier acquittal, up to two, lengthens a trial."""

CONVICTING_DEATHS = 2
"""Engines that must die while running the same suspect alone: a single one may have been killed by
an operator or by its machine."""

MAX_TRIES = 3
"""Engines that may die for unknown reasons while the same suspect waits there to run alone."""


class Probation:
    """Which requests are suspects, and which of them runs alone now.

    Args:
        max_resumes: how many engines may die with a request before it is suspected.
        patience: seconds after which a suspect that is neither cleared nor convicted is given up.
    """

    def __init__(self, max_resumes: int, patience: float) -> None:
        self.on_trial: RoutedRequest | None = None
        """The suspect that runs alone, or will as soon as there is an engine."""
        self.suspects: dict[RoutedRequest, float] = {}
        """When each became one, in the order of their turns."""
        self._max_resumes = max_resumes
        self._patience = patience
        self._pausing_until_next_trial = False

    def is_suspect(self, request: RoutedRequest) -> bool:
        """Whether too many engines died with a request for it to run beside others."""
        return len(request.suspicion.died_on) > self._max_resumes

    def may_run(self, request: RoutedRequest) -> bool:
        """Whether a request may be sent to an engine: it is on trial, or cannot become a suspect.

        A request that becomes a suspect if an engine that it left has died waits until that is
        known.
        """
        suspicion = request.suspicion
        possible = len(suspicion.died_on) + len(suspicion.in_doubt)
        return possible <= self._max_resumes or request is self.on_trial

    def next(self) -> RoutedRequest | None:
        """Begin the next trial if it is time for one, and return the suspect.

        Suspects that left an engine which may have died wait until that is known.
        """
        if self.on_trial is not None or self._pausing_until_next_trial:
            return None
        request = next((each for each in self.suspects if not each.suspicion.in_doubt), None)
        if request is not None:
            steps = STEPS_ALONE * STEPS_GROWTH ** min(request.suspicion.clearances, 2)
            request.message = msgspec.structs.replace(request.message, alone=steps)
            request.suspicion.alone_on = None
            self.on_trial = request
        return request

    def broke_off(self, request: RoutedRequest) -> None:
        """A suspect has lost its engine: others are tried first unless it ran alone there."""
        if not request.suspicion.deaths_alone:
            self.suspects[request] = self.suspects.pop(request)
        if self.on_trial is request:
            self.on_trial = None

    def watch(self, stats: EngineStats) -> None:
        """An engine reports the request that it runs alone: a trial has begun, or ended well."""
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
        """A request caused the deaths that others are suspected of, too.

        No trial begins before the next tick: by then, other sequences of the same request are
        closed.
        """
        self.drop(request)
        self._pausing_until_next_trial = True
        for other in in_flight:
            if other is not request:
                other.suspicion.died_on -= request.suspicion.died_on

    def _acquit(self, request: RoutedRequest) -> None:
        self.drop(request)
        request.message = msgspec.structs.replace(request.message, alone=0)

    def drop(self, request: RoutedRequest) -> None:
        """The request has ended, or is no longer a suspect."""
        self.suspects.pop(request, None)
        if self.on_trial is request:
            self.on_trial = None

    def overdue(self, now: float) -> list[RoutedRequest]:
        """Return the suspects that have waited too long."""
        return [each for each, since in self.suspects.items() if now - since > self._patience]

    def tick(self) -> list[RoutedRequest]:
        """Time has passed; return the waiting requests that are no longer suspects."""
        self._pausing_until_next_trial = False
        waiting = [each for each in self.suspects if each is not self.on_trial]
        acquitted = [each for each in waiting if not self.is_suspect(each)]
        for each in acquitted:
            self._acquit(each)
        return acquitted
