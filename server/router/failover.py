"""What happens to requests whose engines die, fall silent, lose them, or are halted.

A state machine without I/O. Requests move to other engines with their tokens so far, or wait for an
engine. Requests that were in flight on too many engines that died are suspects, and run alone
(`server.router.probation`).
"""

import logging
from collections.abc import Mapping

from server.router.delivery import Delivery
from server.router.events import Action, Count, Fail
from server.router.generation_client import KillsEngines, NoEngineAvailable
from server.router.load import Loads
from server.router.members import EngineLost, Members
from server.router.probation import CONVICTING_DEATHS, MAX_TRIES, Probation
from server.router.request import RoutedRequest
from server.router.route import Engine

logger = logging.getLogger(__name__)

PROBATION_PATIENCE = 10
"""Multiple of `resume_timeout` after which a suspect is given up if it is neither cleared nor
convicted."""

ALL_HALTED = "All engines are paused or asleep, and none resumed in time; try again later."


class Failover:
    """Keeps every request on an engine, or waiting for one, until it ends.

    Args:
        members: the engines that there are.
        loads: what has been sent to them.
        delivery: the requests in flight.
        max_resumes: how many engines may die with a request before it is suspected.
        resume_timeout: seconds that a request waits for an engine.
        halted_timeout: seconds that it waits while operators have all engines halted.
    """

    def __init__(
        self,
        *,
        members: Members,
        loads: Loads,
        delivery: Delivery,
        max_resumes: int,
        resume_timeout: float,
        halted_timeout: float,
    ) -> None:
        self.waiting: dict[RoutedRequest, float] = {}
        """Requests that are on no engine, and since when."""
        self.probation = Probation(max_resumes, PROBATION_PATIENCE * resume_timeout)
        self._members = members
        self._loads = loads
        self._delivery = delivery
        self._resume_timeout = resume_timeout
        self._halted_timeout = halted_timeout

    # -- requests and their engines --------------------------------------------------------------

    def place(self, request: RoutedRequest, now: float) -> list[Action]:
        """Send a request to an engine; it waits if none can take it, or if none should yet."""
        since = self.waiting.pop(request, None)
        if self.probation.may_run(request) and (actions := self._delivery.send(request, now)):
            request.waited_since = since
            return actions
        self.waiting[request] = now if since is None else since
        return []

    def place_again(self, request: RoutedRequest, now: float) -> list[Action]:
        """Resend a request; later outputs of its earlier engine do not count."""
        self._delivery.renumber(request, now)
        return self.place(request, now)

    def not_sent(self, request: RoutedRequest, now: float) -> None:
        """The engine that a request was sent to could not be reached: it waits as before."""
        since = request.waited_since
        self.waiting[request] = now if since is None else since

    def forget(self, request: RoutedRequest) -> None:
        """A request has ended."""
        self.waiting.pop(request, None)
        self.probation.drop(request)

    def place_waiting(self, now: float) -> list[Action]:
        """Engines have come or resumed: place the requests that wait for one."""
        actions: list[Action] = []
        ready = self._members.ready
        for request in list(self.waiting):
            if ready or request.pinned_rank is not None:
                actions += self.place(request, now)
        return actions

    def hand_over(self, now: float) -> list[Action]:
        """Send the requests of halted engines to others if the operators want that."""
        actions: list[Action] = []
        if not self._members.ready:
            return []
        for route in self._members.routes.values():
            if not route.hands_over:
                continue
            engine = route.engine
            running = self._delivery.running_on(engine)
            moving = [request for request in running if request.pinned_rank is None]
            if moving:
                logger.info("engine %d is halted: moving %d requests", engine[0], len(moving))
                actions += self._delivery.abort([each.id for each in moving], engine)
            for request in moving:
                actions += self.place_again(request, now)
        return actions

    def send_again(self, engine: Engine, now: float) -> list[Action]:
        """Resend the requests of a living engine, because messages to or from it were lost."""
        again = self._delivery.running_on(engine)
        route = self._members.find(*engine)
        if route is not None:
            self._loads.forget_unreceived(route)
            route.images = None
        what = "messages to or from engine %d were lost: resending %d requests"
        logger.warning(what, engine[0], len(again))
        actions = self._delivery.abort([each.id for each in again], engine) if again else []
        for request in again:
            request.suspicion.alone_on = None
            actions += self.place_again(request, now)
        return actions

    def _move(self, request: RoutedRequest, now: float) -> list[Action]:
        """A request has lost its engine: it goes to another, or waits for its turn to run alone."""
        request.engine = None
        actions = self._look_at(request, now)
        if actions is not None:
            return actions
        return [Count("requests_resumed"), *self.place_again(request, now)]

    # -- engines that go -------------------------------------------------------------------------

    def out_of_reach(self, lost: EngineLost, now: float) -> list[Action]:
        """Move the requests of an engine that is out of reach and may have died.

        Whether it died, perhaps because of one of these requests, only its return or its end will
        show. After a broken connection that is known soon; after silence it may take too long to
        wait.
        """
        engine = lost.engine
        stranded = self._delivery.running_on(engine)
        if stranded:
            logger.warning(
                "engine %d is out of reach: moving %d requests", engine[0], len(stranded)
            )
        actions: list[Action] = []
        for request in stranded:
            actions += self._delivery.leave(request)
            if lost.alone == request.id:
                request.suspicion.alone_on = engine
            request.suspicion.left(engine, was_silent=lost.was_silent)
            actions += self._move(request, now)
        return actions

    def engine_lost(self, lost: EngineLost, now: float) -> list[Action]:
        """An engine process has ended: move its requests, and examine those that had left it."""
        engine = lost.engine
        stranded = self._delivery.running_on(engine)
        if stranded:
            logger.warning("engine %d has gone: moving %d requests", engine[0], len(stranded))
        actions: list[Action] = []
        for request in list(self._delivery.in_flight.values()):
            ran_there, suspicion = request.engine == engine, request.suspicion
            if not ran_there and not suspicion.left_on(engine):
                continue
            ran_alone = suspicion.alone_on == engine or lost.alone == request.id
            if ran_alone and not lost.was_silent:
                suspicion.deaths_alone += 1
                if suspicion.deaths_alone >= CONVICTING_DEATHS:
                    actions += self._convict(request, engine)
                    continue
            if lost.alone and not ran_alone and not lost.was_silent:
                suspicion.excused(engine)
            else:
                suspicion.ended(engine, was_silent=lost.was_silent)
            if ran_there:
                actions += self._delivery.leave(request)
                actions += self._move(request, now)
            else:
                actions += self._look_at(request, now) or ()
        return actions

    def replaced(self, incarnations: Mapping[int, int], now: float) -> list[Action]:
        """Engines that fell silent have died if other processes replaced them."""
        actions: list[Action] = []
        for request in list(self._delivery.in_flight.values()):
            if request.suspicion.silent_on:
                request.suspicion.replaced(incarnations)
                actions += self._look_at(request, now) or ()
        return actions

    def heard(self, engine: Engine) -> None:
        """An engine is alive: it was only out of reach."""
        for request in self._delivery.in_flight.values():
            request.suspicion.heard(engine)

    # -- suspects --------------------------------------------------------------------------------

    def _look_at(self, request: RoutedRequest, now: float) -> list[Action] | None:
        """Decide whether a request is a suspect; None: it may go on as before."""
        probation = self.probation
        if request not in probation.suspects:
            if not probation.is_suspect(request):
                return None
            name, deaths = request.message.request_id, len(request.suspicion.died_on)
            what = "request %s was in flight on %d engines that died: it will run alone"
            logger.warning(what, name, deaths, extra={"request_id": name})
            actions = self._delivery.abort([request.id], request.engine)
            probation.suspects[request] = now
            self._take_off(request, now)
            return actions
        if request.suspicion.tries >= MAX_TRIES:
            return self._kills_engines(request)
        if request.engine is None and request is probation.on_trial:
            probation.broke_off(request)
            self._take_off(request, now)
        return []

    def _take_off(self, request: RoutedRequest, now: float) -> None:
        """Take a request off its engine; it waits only for its turn to run alone."""
        self._delivery.renumber(request, now)
        self.waiting.pop(request, None)

    def begin_trial(self, now: float) -> list[Action]:
        """Send the next suspect to an engine, to run alone, if it is time for one."""
        if (request := self.probation.next()) is not None:
            return self.place_again(request, now)
        return []

    def _convict(self, request: RoutedRequest, engine: Engine) -> list[Action]:
        """An engine died while it ran a request alone: others did not cause the earlier deaths."""
        request.suspicion.alone_on = engine
        self.probation.convicted(request, self._delivery.in_flight.values())
        return self._kills_engines(request)

    def _kills_engines(self, request: RoutedRequest) -> list[Action]:
        name, why = request.message.request_id, request.suspicion.says()
        logger.error("request %s: %s", name, why, extra={"request_id": name})
        return self._end(request, KillsEngines(why))

    # -- requests that cannot go on --------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Time has passed: end requests that have waited too long, and let acquitted ones run."""
        actions: list[Action] = []
        only_halted = self._members.has_engines and not self._members.ready
        for request, since in list(self.waiting.items()):
            waits_for_operator = only_halted and request.pinned_rank is None
            within = self._halted_timeout if waits_for_operator else self._resume_timeout
            if now - since > within:
                name = request.message.request_id
                why = ALL_HALTED if waits_for_operator else self._why_no_engine(request)
                logger.error("request %s: %s", name, why, extra={"request_id": name})
                actions += self._end(request, NoEngineAvailable(why))
        for request in self.probation.overdue(now):
            actions += self._kills_engines(request)
        for request in self.probation.tick():
            actions += self.place_again(request, now)
        return actions

    def _why_no_engine(self, request: RoutedRequest) -> str:
        if request.pinned_rank is None:
            return "the engine died and no other could take over the request"
        return (
            f"engine {request.pinned_rank}, the only one that may run the request, has gone "
            f"and was not back within {self._resume_timeout:g} s"
        )

    def _end(self, request: RoutedRequest, error: NoEngineAvailable | KillsEngines) -> list[Action]:
        ended = self._delivery.end(request)
        assert ended, f"request {request.id} is ended but not known"
        self.forget(request)
        return [*self._delivery.abort([request.id], request.engine), Fail(request, error)]
