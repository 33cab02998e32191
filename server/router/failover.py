"""Failover of requests whose engines die, fall silent, lose them, or are halted.

A state machine without I/O. Requests move to other engines with their tokens so far, or wait for an
engine. Requests that were in flight on too many engines that died are suspects, and are tried one
at a time. Innocent requests that shared engines with the culprit become suspects too, so being a
suspect is not an error: a suspect runs alone, and the result shows whether it kills engines.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from engine.shared.messages import EngineStats
from server.router.delivery import Delivery
from server.router.events import Action, Count, Fail
from server.router.generation_client import KillsEngines, NoEngineAvailable
from server.router.load import Loads
from server.router.members import EngineLost, Members
from server.router.request import RoutedRequest
from server.router.route import Engine

logger = logging.getLogger(__name__)

PROBATION_PATIENCE = 10
"""Multiple of `resume_timeout` after which an undecided suspect fails."""

ALL_HALTED = "All engines are paused or asleep, and none resumed in time; try again later."

EXCLUSIVE_STEPS = 8
"""Sampling steps of a trial: more than were lost with its engine."""

STEPS_GROWTH = 4
"""Factor by which each earlier acquittal, up to two, lengthens a trial."""

CONVICTING_DEATHS = 2
"""Engines that must die while running the same suspect alone to convict it: a single one could have
been killed by an operator or a hardware fault."""

MAX_TRIES = 3
"""Engines that may die for unknown reasons while the same suspect waits there to run alone."""


class Probation:
    """Tracks suspects, and which of them is on trial.

    Args:
        max_resumes: maximum engines that may die with a request before it becomes a suspect.
        patience: seconds after which a suspect that is neither cleared nor convicted fails.
    """

    def __init__(self, max_resumes: int, patience: float) -> None:
        self.on_trial: RoutedRequest | None = None
        """The suspect that runs alone, or will once an engine is available."""
        self.suspects: dict[RoutedRequest, float] = {}
        """Times at which requests became suspects, in trial order."""
        self._max_resumes = max_resumes
        self._patience = patience
        self._pausing_until_next_trial = False

    def is_suspect(self, request: RoutedRequest) -> bool:
        """Return whether too many engines died with a request for it to share a step."""
        return len(request.suspicion.died_on) > self._max_resumes

    def may_run(self, request: RoutedRequest) -> bool:
        """Return whether a request can be sent: it is on trial, or cannot become a suspect.

        A request that would become a suspect if an engine that it left has died waits until that is
        known.
        """
        suspicion = request.suspicion
        possible = len(suspicion.died_on) + len(suspicion.in_doubt)
        return possible <= self._max_resumes or request is self.on_trial

    def next(self) -> RoutedRequest | None:
        """Begin the next trial if one is due, and return the suspect.

        Suspects that left an engine that may have died wait until that is known.
        """
        if self.on_trial is not None or self._pausing_until_next_trial:
            return None
        request = next((each for each in self.suspects if not each.suspicion.in_doubt), None)
        if request is not None:
            steps = EXCLUSIVE_STEPS * STEPS_GROWTH ** min(request.suspicion.clearances, 2)
            request.message = msgspec.structs.replace(request.message, exclusive_steps=steps)
            request.suspicion.exclusive_on = None
            self.on_trial = request
        return request

    def abort_trial(self, request: RoutedRequest) -> None:
        """End a suspect's trial, as its engine was lost; requeue it last unless it ran alone."""
        if not request.suspicion.exclusive_deaths:
            self.suspects[request] = self.suspects.pop(request)
        if self.on_trial is request:
            self.on_trial = None

    def watch(self, stats: EngineStats) -> None:
        """Update the trial from an engine's report of the request that it runs alone."""
        request = self.on_trial
        engine = (stats.rank, stats.incarnation)
        if request is None or request.engine != engine:
            return
        if stats.exclusive_request == request.id:
            request.suspicion.exclusive_on = engine
        elif request.suspicion.exclusive_on == engine:
            self._acquit(request)
            request.suspicion.cleared()

    def convicted(self, request: RoutedRequest, in_flight: Iterable[RoutedRequest]) -> None:
        """Clear other requests of the deaths that the convicted one caused.

        No trial begins before the next tick, by which time other sequences of the same request are
        closed.
        """
        self.drop(request)
        self._pausing_until_next_trial = True
        for other in in_flight:
            if other is not request:
                other.suspicion.died_on -= request.suspicion.died_on

    def _acquit(self, request: RoutedRequest) -> None:
        self.drop(request)
        request.message = msgspec.structs.replace(request.message, exclusive_steps=0)

    def drop(self, request: RoutedRequest) -> None:
        """Remove a request that has ended or is no longer a suspect."""
        self.suspects.pop(request, None)
        if self.on_trial is request:
            self.on_trial = None

    def overdue(self, now: float) -> list[RoutedRequest]:
        """Return the suspects whose time is up."""
        return [each for each, since in self.suspects.items() if now - since > self._patience]

    def tick(self) -> list[RoutedRequest]:
        """Handle a tick; return the waiting requests that are no longer suspects."""
        self._pausing_until_next_trial = False
        waiting = [each for each in self.suspects if each is not self.on_trial]
        acquitted = [each for each in waiting if not self.is_suspect(each)]
        for each in acquitted:
            self._acquit(each)
        return acquitted


@dataclass(eq=False)
class Failover:
    """Keeps every unfinished request assigned to an engine, or waiting for one."""

    members: Members
    loads: Loads
    delivery: Delivery
    max_resumes: int
    """Maximum engines that may die with a request before it becomes a suspect."""
    resume_timeout: float
    """Seconds that a request waits for an engine."""
    halted_timeout: float
    """Seconds that it waits while all engines are halted by operators."""

    def __post_init__(self) -> None:
        self.waiting: dict[RoutedRequest, float] = {}
        """Unassigned requests, with the time since which they wait."""
        self.probation = Probation(self.max_resumes, PROBATION_PATIENCE * self.resume_timeout)

    # -- requests and their engines --------------------------------------------------------------

    def assign(self, request: RoutedRequest, now: float) -> list[Action]:
        """Send a request to an engine; queue it if none is available or it must wait."""
        since = self.waiting.pop(request, None)
        if self.probation.may_run(request) and (actions := self.delivery.send(request, now)):
            request.waiting_since = since
            return actions
        self.waiting[request] = now if since is None else since
        return []

    def reassign(self, request: RoutedRequest, now: float) -> list[Action]:
        """Resend a request; later outputs of its previous engine are ignored."""
        self.delivery.renumber(request, now)
        return self.assign(request, now)

    def send_failed(self, request: RoutedRequest, now: float) -> None:
        """Requeue a request whose engine was unreachable, keeping its waiting time."""
        since = request.waiting_since
        self.waiting[request] = now if since is None else since

    def forget(self, request: RoutedRequest) -> None:
        """Drop a request that has ended."""
        self.waiting.pop(request, None)
        self.probation.drop(request)

    def assign_waiting(self, now: float) -> list[Action]:
        """Place waiting requests after engines have joined or resumed."""
        actions: list[Action] = []
        ready = self.members.ready
        for request in list(self.waiting):
            if ready or request.pinned_rank is not None:
                actions += self.assign(request, now)
        return actions

    def hand_over(self, now: float) -> list[Action]:
        """Move requests of halted engines to other engines if operators requested that."""
        actions: list[Action] = []
        if not self.members.ready:
            return []
        for route in self.members.routes.values():
            if not route.hands_over:
                continue
            engine = route.engine
            running = self.delivery.running_on(engine)
            moving = [request for request in running if request.pinned_rank is None]
            if moving:
                logger.info("engine %d is halted: moving %d requests", engine[0], len(moving))
                actions += self.delivery.abort([each.id for each in moving], engine)
            for request in moving:
                actions += self.reassign(request, now)
        return actions

    def resend(self, engine: Engine, now: float) -> list[Action]:
        """Resend the requests of a live engine after messages to or from it were lost."""
        requests = self.delivery.running_on(engine)
        route = self.members.find(*engine)
        if route is not None:
            self.loads.forget_unreceived(route)
            route.images = None
        text = "messages to or from engine %d were lost: resending %d requests"
        logger.warning(text, engine[0], len(requests))
        actions = self.delivery.abort([each.id for each in requests], engine) if requests else []
        for request in requests:
            request.suspicion.exclusive_on = None
            actions += self.reassign(request, now)
        return actions

    def _move(self, request: RoutedRequest, now: float) -> list[Action]:
        """Move a request that lost its engine, or queue it as a suspect."""
        request.engine = None
        actions = self._check_suspicion(request, now)
        if actions is not None:
            return actions
        return [Count("requests_resumed"), *self.reassign(request, now)]

    # -- lost engines ----------------------------------------------------------------------------

    def mark_unreachable(self, lost: EngineLost, now: float) -> list[Action]:
        """Move the requests of an engine that is unreachable and may have died.

        Only its return or its end will show whether it died, perhaps because of one of these
        requests. After a broken connection that is known soon; after silence it can take too long
        to wait.
        """
        engine = lost.engine
        running = self.delivery.running_on(engine)
        if running:
            logger.warning("engine %d is unreachable: moving %d requests", engine[0], len(running))
        actions: list[Action] = []
        for request in running:
            actions += self.delivery.leave(request)
            if lost.exclusive_request == request.id:
                request.suspicion.exclusive_on = engine
            request.suspicion.left(engine, was_silent=lost.was_silent)
            actions += self._move(request, now)
        return actions

    def engine_lost(self, lost: EngineLost, now: float) -> list[Action]:
        """Handle the end of an engine process: move its requests, and update those that left it."""
        engine = lost.engine
        running = self.delivery.running_on(engine)
        if running:
            logger.warning("engine %d has exited: moving %d requests", engine[0], len(running))
        actions: list[Action] = []
        for request in list(self.delivery.in_flight.values()):
            ran_there, suspicion = request.engine == engine, request.suspicion
            if not ran_there and not suspicion.left_on(engine):
                continue
            ran_exclusively = (
                suspicion.exclusive_on == engine or lost.exclusive_request == request.id
            )
            if ran_exclusively and not lost.was_silent:
                suspicion.exclusive_deaths += 1
                if suspicion.exclusive_deaths >= CONVICTING_DEATHS:
                    suspicion.exclusive_on = engine  # others did not cause the earlier deaths
                    self.probation.convicted(request, self.delivery.in_flight.values())
                    actions += self._kills_engines(request)
                    continue
            if lost.exclusive_request and not ran_exclusively and not lost.was_silent:
                suspicion.clear_doubt(engine)
            else:
                suspicion.ended(engine, was_silent=lost.was_silent)
            if ran_there:
                actions += self.delivery.leave(request)
                actions += self._move(request, now)
            else:
                actions += self._check_suspicion(request, now) or ()
        return actions

    def replaced(self, incarnations: Mapping[int, int], now: float) -> list[Action]:
        """Count silent engines as dead if other processes have replaced them."""
        actions: list[Action] = []
        for request in list(self.delivery.in_flight.values()):
            if request.suspicion.silent_on:
                request.suspicion.replaced(incarnations)
                actions += self._check_suspicion(request, now) or ()
        return actions

    def engine_alive(self, engine: Engine) -> None:
        """Clear suspicions over an engine that is alive and was only unreachable."""
        for request in self.delivery.in_flight.values():
            request.suspicion.engine_alive(engine)

    # -- suspects --------------------------------------------------------------------------------

    def _check_suspicion(self, request: RoutedRequest, now: float) -> list[Action] | None:
        """Check whether a request is a suspect; return None if it can continue normally."""
        probation = self.probation
        if request not in probation.suspects:
            if not probation.is_suspect(request):
                return None
            name, deaths = request.message.request_id, len(request.suspicion.died_on)
            text = "request %s was in flight on %d engines that died: it will run alone"
            logger.warning(text, name, deaths, extra={"request_id": name})
            actions = self.delivery.abort([request.id], request.engine)
            probation.suspects[request] = now
            self._unassign(request, now)
            return actions
        if request.suspicion.tries >= MAX_TRIES:
            return self._kills_engines(request)
        if request.engine is None and request is probation.on_trial:
            probation.abort_trial(request)
            self._unassign(request, now)
        return []

    def _unassign(self, request: RoutedRequest, now: float) -> None:
        """Unassign a request, which then only waits for its trial."""
        self.delivery.renumber(request, now)
        self.waiting.pop(request, None)

    def _kills_engines(self, request: RoutedRequest) -> list[Action]:
        name, why = request.message.request_id, request.suspicion.error_message()
        logger.error("request %s: %s", name, why, extra={"request_id": name})
        return self._end(request, KillsEngines(why))

    # -- timeouts --------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Fail requests that have waited too long, and place acquitted ones."""
        actions: list[Action] = []
        only_halted = self.members.has_engines and not self.members.ready
        for request, since in list(self.waiting.items()):
            waits_for_operator = only_halted and request.pinned_rank is None
            within = self.halted_timeout if waits_for_operator else self.resume_timeout
            if now - since > within:
                name = request.message.request_id
                if waits_for_operator:
                    why = ALL_HALTED
                elif request.pinned_rank is None:
                    why = "the engine died and no other could take over the request"
                else:
                    why = (
                        f"engine {request.pinned_rank}, the only one that may run the request, has "
                        f"gone and did not return within {self.resume_timeout:g} s"
                    )
                logger.error("request %s: %s", name, why, extra={"request_id": name})
                actions += self._end(request, NoEngineAvailable(why))
        for request in self.probation.overdue(now):
            actions += self._kills_engines(request)
        for request in self.probation.tick():
            actions += self.reassign(request, now)
        return actions

    def _end(self, request: RoutedRequest, error: NoEngineAvailable | KillsEngines) -> list[Action]:
        ended = self.delivery.end(request)
        assert ended, f"request {request.id} is ended but not known"
        self.forget(request)
        return [*self.delivery.abort([request.id], request.engine), Fail(request, error)]
