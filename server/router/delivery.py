"""Requests in flight: sent to engines, and their outputs received.

A state machine without I/O. A request gets a new id each time it is sent, so that outputs sent by
an earlier engine or connection are ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.shared.messages import AbortRequests, AddRequest, RequestOutput, StepOutputs, WakeUp
from server.router.block_index import BlockIndex
from server.router.events import Action, Count, Deliver, Notify, Send, SendIfReachable, Woken
from server.router.load import Loads
from server.router.members import Members
from server.router.request import Prefill, RoutedRequest
from server.router.route import Engine, Route
from server.router.routing import Choice, EngineLoad, RoutingPolicy, with_adapter, with_cached
from server.router.split import Split, answer_of, draws_one_token, prefill_of


@dataclass(kw_only=True, eq=False)
class Delivery:
    """Sends each request to its pinned engine, or to one chosen by the policy."""

    front_end: int
    first_id: int
    """Start of the request numbering; ranges of front ends must not overlap."""
    members: Members
    loads: Loads
    policy: RoutingPolicy
    index: BlockIndex | None = None
    """KV blocks held by engines, if the policy uses them."""
    split: Split | None = None
    """Chooses prompts for separate prefill engines."""

    def __post_init__(self) -> None:
        self.in_flight: dict[int, RoutedRequest] = {}
        """Unfinished requests, by the id under which they were last sent."""
        self._next_id = self.first_id
        self._prefilled: list[RoutedRequest] = []
        self._woken_at: float | None = None

    # -- requests --------------------------------------------------------------------------------

    def begin(self, request: RoutedRequest) -> None:
        """Add a new request, not assigned to an engine."""
        self._next_id += 1
        request.message = msgspec.structs.replace(
            request.message,
            id=self._next_id,
            front_end=self.front_end,
            wave=self.members.wave,
        )
        self.in_flight[request.id] = request

    def renumber(self, request: RoutedRequest, now: float) -> None:
        """Unassign a request from its engine; later outputs of that engine are ignored."""
        request.times.left(now)
        request.engine = None
        del self.in_flight[request.id]
        self.begin(request)

    def end(self, request: RoutedRequest) -> bool:
        """Remove a request; return False if it had already ended."""
        return self.in_flight.pop(request.id, None) is not None

    def running_on(self, engine: Engine) -> list[RoutedRequest]:
        return [each for each in self.in_flight.values() if each.engine == engine]

    # -- out -------------------------------------------------------------------------------------

    def send(self, request: RoutedRequest, now: float) -> list[Action]:
        """Send a request to an engine; return no actions if none is available."""
        choice = self._choose(request)
        if choice is None:
            return []
        members = self.members
        route = members.routes[choice.rank]
        assert route.identity is not None, f"engine {choice.rank} was offered without a route"
        message = request.to_send(members.wave)
        if request.prefill is Prefill.RUNNING:
            message = prefill_of(message)
        elif request.prefill is Prefill.DONE:
            request.prefill = Prefill.NONE  # if this engine is lost, start over
            engine = request.prefilled_by
            message = answer_of(message, None if engine is None else members.find(*engine))
        message = route.without_cached_images(message)
        was_paused = members.paused
        self.loads.sent(route, message.num_tokens)
        request.engine = rank, incarnation = route.engine
        request.times.sent(rank, now)
        if message.exclusive_steps:
            request.suspicion.tried_on = request.engine
        actions: list[Action] = [Send(route.identity, rank, incarnation, message, choice.reason)]
        if images := message.encoder_inputs:
            actions.append(Count("mm_cache_queries", len(images)))
            actions.append(Count("mm_cache_hits", sum(not each.pixels for each in images)))
        if not was_paused:
            return actions
        if self._woken_at is None:
            self._woken_at = now
        return [*actions, Notify(WakeUp(self.front_end, rank, members.wave))]

    def send_failed(self, message: AddRequest, engine: Engine) -> RoutedRequest | None:
        """Handle a failed send: return the request, now unassigned, if it has not ended."""
        route = self.members.find(*engine)
        if route is not None:
            self.loads.send_failed(route, message.num_tokens)
            route.images = None
        request = self.in_flight.get(message.id)
        if request is not None:
            request.engine = request.suspicion.tried_on = None
        return request

    def _choose(self, request: RoutedRequest) -> Choice | None:
        routes, pinned_rank = self.members.routes, request.pinned_rank
        request.expected_cached = None
        if request.prefill is Prefill.RUNNING:
            request.prefill = Prefill.NONE
        if pinned_rank is not None:
            route = routes.get(pinned_rank)
            is_available = route is not None and route.is_open and route.can_serve(request.message)
            return Choice(pinned_rank, "pinned") if is_available else None
        candidates = usable = [
            each for each in routes.values() if each.is_usable and each.can_serve(request.message)
        ]
        may_split = self.members.has_prefill_engines or request.message.offers_blocks
        if self.split is not None and may_split:
            usable = self.split.answering(request.message, candidates)
        loads = self.loads.of(usable)
        if not loads:
            return None
        cached: dict[int, int] = {}
        if self.index is not None:
            engines = [each.engine for each in candidates]
            cached = self.index.cached_tokens(engines, request.message, request.output_token_ids)
            loads = with_cached(loads, cached)
        choice = self._choose_by(self.policy, loads, request)
        if adapter := request.message.adapter:
            resident = {
                route.entry.rank
                for route in usable
                if (stats := route.stats) is not None
                and stats.adapters is not None
                and adapter in stats.adapters.resident
            }
            choice = with_adapter(choice, loads, resident)
        if request.prefill is Prefill.NONE:
            choice = self._choose_prefill(request, candidates, choice, cached) or choice
            if self.index is not None:
                request.expected_cached = cached.get(choice.rank, 0)
        return choice

    def _choose_prefill(
        self,
        request: RoutedRequest,
        usable: list[Route],
        answers: Choice,
        cached: dict[int, int],
    ) -> Choice | None:
        """Return the prefill engine for a request; None if the answering one prefills."""
        if self.split is None or not self.members.has_prefill_engines:
            return None
        route, known = self.members.routes[answers.rank], cached.get(answers.rank, 0)
        engines = self.split.prefilling(request, usable, route, known)
        if not engines:
            return None
        loads = with_cached(self.loads.of(engines), cached)
        rank = self._choose_by(self.split.policy, loads, request).rank
        chosen = next(load for load in loads if load.rank == rank)
        if not self.split.keeps_up(request, chosen, *self.loads.of([route])):
            return None
        if not draws_one_token(request):
            request.prefill = Prefill.RUNNING
        return Choice(rank, "prefill")

    def _choose_by(
        self, policy: RoutingPolicy, loads: Sequence[EngineLoad], request: RoutedRequest
    ) -> Choice:
        message = request.message
        return policy.choose(
            loads,
            request.shown_token_ids,
            self.members.unseen_front_ends(self.loads.num_front_ends),
            cache_root=message.cache_root + message.adapter.encode(),
        )

    def abort(self, ids: list[int], engine: Engine | None) -> list[Action]:
        """Abort requests on an engine process, if it is reachable."""
        route = None if engine is None else self.members.find(*engine)
        if route is None or route.identity is None:
            return []
        return [SendIfReachable(route.identity, AbortRequests(ids))]

    def leave(self, request: RoutedRequest) -> list[Action]:
        """Abort a request on an engine that may only be silent, to save it the work."""
        assert request.engine is not None, f"request {request.id} is on no engine that it can leave"
        identity = self.members.last_identity(request.engine)
        return [] if identity is None else [SendIfReachable(identity, AbortRequests([request.id]))]

    # -- back ------------------------------------------------------------------------------------

    def outputs(self, message: StepOutputs, order: int, now: float) -> list[Action]:
        """Process the outputs of a step.

        Args:
            order: 0 if the message is the next one of its engine; otherwise it is not delivered,
                since earlier messages were lost (positive), or it is a duplicate (negative).
        """
        stats = message.stats
        engine = (stats.rank, stats.incarnation)
        in_flight, delivered, stale = self.in_flight, [], []
        counts: list[Action] = []
        for output in message.outputs if order >= 0 else ():
            request = in_flight.get(output.id)
            if request is None:
                if output.finish_reason is None:
                    stale.append(output.id)  # has moved on, or its abort was lost
            elif order == 0 and request.engine == engine:
                if output.timing is not None:
                    request.times.record_timing(
                        output.timing, now, last=output.finish_reason is not None
                    )
                    if request.expected_cached is not None:
                        expected, cached = request.expected_cached, output.num_cached_tokens
                        counts.append(Count("routing_expected_cached_tokens", expected))
                        counts.append(Count("routing_found_cached_tokens", cached))
                        request.expected_cached = None
                if request.prefill is Prefill.RUNNING:
                    self._prefill_output(request, output)
                    continue
                if request.cached_at_prefill is not None and output.num_cached_tokens:
                    output = msgspec.structs.replace(
                        output, num_cached_tokens=request.cached_at_prefill
                    )
                if output.finish_reason is not None:
                    del in_flight[output.id]
                request.output_token_ids += output.token_ids
                delivered.append((request, output))
        actions: list[Action] = [Deliver(delivered), *counts] if delivered else []
        return actions + self.abort(stale, engine) if stale else actions

    def _prefill_output(self, request: RoutedRequest, output: RequestOutput) -> None:
        """Process an output of a prefill engine; its token is discarded."""
        if output.finish_reason is None:
            return
        has_succeeded = output.finish_reason in ("length", "stop")
        if has_succeeded and request.cached_at_prefill is None:
            request.cached_at_prefill = output.num_cached_tokens
        request.prefilled_by = request.engine if has_succeeded else None
        request.prefill = Prefill.DONE
        self._prefilled.append(request)

    def take_prefilled(self) -> list[RoutedRequest]:
        """Return and clear the prefilled requests, which are to continue elsewhere."""
        prefilled, self._prefilled = self._prefilled, []
        return prefilled

    def engines_run(self, now: float) -> list[Action]:
        """Record that engines are running, which ends a pending wake-up."""
        if self._woken_at is None:
            return []
        woken_at, self._woken_at = self._woken_at, None
        return [Woken(now - woken_at)]
