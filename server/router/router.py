"""A front end's router: chooses an engine for each request, and handles engine failures.

Its methods return the actions that `server.router.shell` performs, in order. It has no sockets and
no clock: `now` is in monotonic seconds. Its components:
`members` tracks engines, `loads` their load, `delivery` the requests in flight, `failover` requests
whose engines fail, and `calls` pending utility calls.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from engine.shared.messages import (
    ClusterView,
    EngineDead,
    KvBlocks,
    RouteTaken,
    StepOutputs,
    UtilityCall,
    UtilityResult,
    UtilityValue,
)
from engine.shared.scope import EVERYTHING, Scope
from server.router.block_index import BlockIndex
from server.router.delivery import Delivery
from server.router.events import (
    Action,
    CallResult,
    Count,
    Deliver,
    EngineHello,
    Event,
    Send,
    SendIfReachable,
    SendsFailed,
    Tick,
)
from server.router.failover import Failover
from server.router.generation_client import NoEngineAvailable, NoSuchEngine
from server.router.load import Loads
from server.router.load_table import LoadTable
from server.router.members import EngineLost, Members
from server.router.request import RoutedRequest
from server.router.route import Engine, Route
from server.router.routing import RoutingPolicy
from server.router.split import Split


@dataclass
class _OpenCall:
    pending: dict[int, int]
    """Incarnations of the engines that have not answered, by rank."""
    results: dict[int, UtilityResult] = field(default_factory=dict)


class UtilityCalls:
    """Pending utility calls, by call id."""

    def __init__(self, front_end: int) -> None:
        self._front_end = front_end
        self._open: dict[int, _OpenCall] = {}

    def begin(
        self,
        call_id: int,
        rank: int | None,
        name: str,
        arguments: dict[str, UtilityValue],
        routes: Iterable[Route],
    ) -> list[Action]:
        """Call one engine, or all with rank None.

        Raises:
            NoEngineAvailable: there is no such engine now.
        """
        called = [route for route in routes if route.is_open and rank in (None, route.entry.rank)]
        if not called:
            which = "no engine can" if rank is None else f"engine {rank} cannot"
            raise NoEngineAvailable(f"{which} be called now")
        self._open[call_id] = _OpenCall(dict(route.engine for route in called))
        message = UtilityCall(call_id, self._front_end, name, arguments)
        return [Send(route.identity or b"", *route.engine, message) for route in called]

    def answered(self, result: UtilityResult) -> list[Action]:
        """Record an answer; unexpected ones are dropped."""
        call = self._open.get(result.call_id)
        if call is None or call.pending.pop(result.rank, None) is None:
            return []
        call.results[result.rank] = result
        if call.pending:
            return []
        del self._open[result.call_id]
        return [CallResult(result.call_id, [call.results[rank] for rank in sorted(call.results)])]

    def engine_lost(self, engine: Engine) -> list[Action]:
        """Record errors for calls to an engine process that has ended."""
        rank, incarnation = engine
        actions: list[Action] = []
        for call_id, call in list(self._open.items()):
            if call.pending.get(rank) == incarnation:
                error = f"engine {rank} died before it answered"
                actions += self.answered(UtilityResult(call_id, rank, error=error))
        return actions

    def overdue(self, call_id: int, why: str) -> list[Action]:
        """Record errors for all missing answers: the caller has stopped waiting."""
        call = self._open.get(call_id)
        actions: list[Action] = []
        for rank in list(call.pending) if call is not None else ():
            error = f"engine {rank} did not answer {why}; it may still do so"
            actions += self.answered(UtilityResult(call_id, rank, error=error))
        return actions


logger = logging.getLogger(__name__)


class Router:
    """Sends each request to the least-loaded engine, and tracks it until it ends."""

    def __init__(
        self,
        *,
        front_end: int,
        incarnation: int,
        first_id: int,
        policy: RoutingPolicy,
        table: LoadTable | None,
        grace: float,
        max_resumes: int,
        resume_timeout: float,
        halted_timeout: float,
        scope: Scope = EVERYTHING,
        num_ranks: int = 0,
        index: BlockIndex | None = None,
        split: Split | None = None,
    ) -> None:
        """Start without any engines; for the arguments see the component classes."""
        self.members = Members(incarnation, grace, scope, num_ranks)
        self.loads = Loads(front_end, incarnation, grace, table)
        self.delivery = Delivery(
            front_end=front_end,
            first_id=first_id,
            members=self.members,
            loads=self.loads,
            policy=policy,
            index=index,
            split=split,
        )
        self.failover = Failover(
            self.members, self.loads, self.delivery, max_resumes, resume_timeout, halted_timeout
        )
        self.calls = UtilityCalls(front_end)
        self.index = index
        """Index of engines' KV blocks; None if the policy does not use it."""

    # -- event handling --------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle an event."""
        match event:
            case StepOutputs():
                actions = self._outputs(event, now)
            case UtilityResult():
                return self.calls.answered(event)
            case KvBlocks():
                is_reset = self.index is not None and self.index.take(event)
                return [Count("routing_index_resyncs")] if is_reset else []
            case _:
                actions = self._engines_changed(event, now)
                actions += self.failover.assign_waiting(now)
                actions += self.failover.hand_over(now)
        if self.failover.probation.suspects:
            actions += self._trial(now)
        return actions

    def _trial(self, now: float) -> list[Action]:
        """Send the next suspect to an engine, to run alone, if a trial is due."""
        suspect = self.failover.probation.next()
        return [] if suspect is None else self.failover.reassign(suspect, now)

    def _engines_changed(
        self, event: EngineHello | ClusterView | EngineDead | SendsFailed | Tick, now: float
    ) -> list[Action]:
        """Handle events that can change which engines are present, reachable or halted.

        Afterwards, waiting requests are placed, and halted engines hand over their requests. Stats
        in outputs also report halted engines, but operators halt engines one after the other:
        requests are moved only on these events, so that none move to an engine about to be halted.
        """
        match event:
            case EngineHello():
                return self._handle_hello(event, now)
            case ClusterView():
                return self._handle_view(event, now)
            case EngineDead():
                return self._handle_death(event, now)
            case SendsFailed(sends):
                return self._sends_failed(sends, now)
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    # -- requests --------------------------------------------------------------------------------

    def submit(self, request: RoutedRequest, now: float) -> list[Action]:
        """Begin a sequence, unless nothing can serve it now; assigns its id.

        Later sequences of a client's request are never refused: they wait for an engine like
        requests that have lost theirs.

        Raises:
            NoEngineAvailable: it is refused.
        """
        members, pinned_rank = self.members, request.pinned_rank
        if request.message.group:
            pass
        elif pinned_rank is None:
            if not members.has_engines:
                raise NoEngineAvailable("no engine can serve now")
        elif pinned_rank >= members.num_ranks:
            raise NoSuchEngine(f"there is no engine {pinned_rank}")
        elif (route := members.routes.get(pinned_rank)) is None or not route.is_open:
            raise NoEngineAvailable(f"engine {pinned_rank} cannot serve now")
        self.delivery.begin(request)
        return self.failover.assign(request, now)

    def close(self, request: RoutedRequest, now: float) -> list[Action]:
        """End a request whose reader has closed it; it may have ended already."""
        actions: list[Action] = []
        if self.delivery.end(request):
            self.failover.forget(request)
            actions = self.delivery.abort([request.id], request.engine)
            if self.failover.probation.suspects:
                actions += self._trial(now)
        return actions

    def block_queries(self, now: float) -> list[Action]:
        """Return the queries that are due for changes of engines' KV blocks."""
        if self.index is None:
            return []
        queries = self.index.queries_due(self.members.routes.values(), now)
        return [SendIfReachable(to, query) for to, query in queries]

    def _outputs(self, message: StepOutputs, now: float) -> list[Action]:
        stats = message.stats
        route = self.members.find(stats.rank, stats.incarnation)
        order = self.loads.outputs_arrived(route, stats)
        has_lost = route is not None and self.loads.observe(route, stats, now)
        actions = self.delivery.outputs(message, order, now)
        for request in self.delivery.take_prefilled():
            actions += self.failover.reassign(request, now)
        if message.outputs or stats.running + stats.waiting > 0:
            actions += self.delivery.engines_run(now)
        if self.failover.probation.suspects and order == 0:
            for action in actions:
                for request, output in action.outputs if isinstance(action, Deliver) else ():
                    if output.finish_reason is not None:
                        self.failover.forget(request)
            self.failover.probation.watch(stats)
        if order > 0 or has_lost:
            actions += self.failover.resend((stats.rank, stats.incarnation), now)
        return actions

    # -- engines ---------------------------------------------------------------------------------

    def _handle_hello(self, event: EngineHello, now: float) -> list[Action]:
        """Handle an engine's hello, which is repeated as a heartbeat."""
        sender, hello = event.sender, event.hello
        engine = (hello.rank, hello.incarnation)
        actions: list[Action] = []
        if self.members.hello_received(sender, hello, now):
            actions += self.failover.resend(engine, now)
        route = self.members.find(*engine)
        if route is not None:
            self.failover.engine_alive(engine)
            if hello.wants_reply and route.is_open:
                actions.append(SendIfReachable(sender, RouteTaken(hello.session)))
        return actions

    def _handle_view(self, view: ClusterView, now: float) -> list[Action]:
        members = self.members
        if not members.is_newer(view):
            return []
        lost = members.take_view(view, now)
        lossy = [
            route.engine
            for route in members.routes.values()
            if (stats := route.entry.stats) is not None and self.loads.observe(route, stats, now)
        ]
        actions = self.delivery.engines_run(now) if view.running else []
        for each in lost:
            actions += self._handle_loss(each, now)
        incarnations = {entry.rank: entry.incarnation for entry in view.engines}
        actions += self.failover.replaced(incarnations, now)
        for engine in lossy:
            actions += self.failover.resend(engine, now)
        return actions

    def _handle_death(self, message: EngineDead, now: float) -> list[Action]:
        logger.error("engine %d died: %s", message.rank, message.reason)
        actions = self.calls.engine_lost((message.rank, message.incarnation))
        for lost in self.members.died(message.rank, message.incarnation):
            actions += self.failover.engine_lost(lost, now)
        return actions

    def _sends_failed(self, sends: list[Send], now: float) -> list[Action]:
        """Handle unreachable engines; unsent requests go to other engines."""
        actions: list[Action] = []
        for send in sends:
            engine = (send.rank, send.incarnation)
            logger.warning("engine %d cannot be reached", send.rank)
            if isinstance(send.message, UtilityCall):
                actions += self.calls.engine_lost(engine)
            elif (request := self.delivery.send_failed(send.message, engine)) is not None:
                self.failover.send_failed(request, now)
        for send in sends:
            for lost in self.members.mark_unreachable(send.rank, send.incarnation):
                actions += self.failover.mark_unreachable(lost, now)
        return actions

    def _tick(self, now: float) -> list[Action]:
        expired, silent = self.members.expire(now), self.members.find_silent(now)
        actions = self.failover.tick(now)
        for lost in expired:
            actions += self._handle_loss(lost, now)
        for lost in silent:
            actions += self.failover.mark_unreachable(lost, now)
        return actions

    def _handle_loss(self, lost: EngineLost, now: float) -> list[Action]:
        return self.calls.engine_lost(lost.engine) + self.failover.engine_lost(lost, now)
