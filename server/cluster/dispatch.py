"""Which engine each request of a front end runs on, and what happens when engines come and go.

A state machine without I/O: events come in as calls with the time, messages go out through the
functions that it is given. `server.cluster.engine_client` owns the sockets, the clock and the
event loop.

A request gets a new id each time it is sent, so nothing that an earlier engine, or an earlier
connection, still says about it is taken for news.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.messages import (
    AbortRequests,
    AddRequest,
    ClusterView,
    EngineDead,
    EngineGreeting,
    EngineInput,
    RequestOutput,
    RouteTaken,
    SamplingParams,
    StepOutputs,
    WakeUp,
)
from server.cluster.generation_client import NoEngineAvailable, NoSuchEngine
from server.cluster.routing import Choice, RoutingPolicy
from server.cluster.state import ClusterState, EngineLost
from server.cluster.token_stream import RequestStream

logger = logging.getLogger(__name__)


class ClientMetrics(Protocol):
    """What is counted about requests and engines."""

    def routing_decision(self, rank: int, reason: str) -> None: ...

    def request_resumed(self) -> None: ...

    def observe_wake(self, seconds: float) -> None: ...


class Dispatcher:
    """Sends each request to the least-loaded engine and keeps it until it ends.

    Args:
        front_end: this front end's number.
        first_id: requests are numbered from here; no other front end may use the same numbers.
        state: what is known of the engines.
        policy: chooses among them.
        send: sends a message to a peer; False if there is no such peer now.
        notify: tells the coordinator of a wake-up.
        on_idle: called when the last request has ended.
        max_resumes: how many engines may die with a request before it is suspected.
        resume_timeout: seconds that a request waits for an engine.
    """

    def __init__(
        self,
        *,
        front_end: int,
        first_id: int,
        state: ClusterState,
        policy: RoutingPolicy,
        metrics: ClientMetrics,
        send: Callable[[bytes, EngineInput], bool],
        notify: Callable[[WakeUp], None],
        on_idle: Callable[[], None],
        max_resumes: int,
        resume_timeout: float,
    ) -> None:
        self.state = state
        self.in_flight: dict[int, RequestStream] = {}
        """Requests that have not ended, by the id under which they were sent last."""
        self._front_end = front_end
        self._next_id = first_id
        self._policy = policy
        self._metrics = metrics
        self._transmit = send
        self._notify = notify
        self._on_idle = on_idle
        self._max_resumes = max_resumes
        self._resume_timeout = resume_timeout
        self._homeless: dict[int, float] = {}
        self._woken_at: float | None = None
        self._out_of_reach: list[EngineLost] = []

    # -- requests --------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        now: float,
        *,
        priority: int = 0,
        pinned_rank: int | None = None,
        tenant: int = 0,
        cache_root: bytes = b"",
    ) -> RequestStream:
        """Route one sequence to an engine and return its stream.

        Raises:
            NoEngineAvailable: no engine, or not the wished one, can take it now.
        """
        request = AddRequest(
            id=self._new_id(),
            request_id=request_id,
            front_end=self._front_end,
            wave=self.state.wave,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            priority=priority,
            tenant=tenant,
            cache_root=cache_root,
        )
        choice = self._choose(request, pinned_rank)
        stream = RequestStream(request, self.close)
        try:
            self._send(stream, choice, now)
            self.in_flight[request.id] = stream
        finally:
            self._settle(now)
        return stream

    def close(self, stream: RequestStream) -> None:
        """Forget a request, aborting it if it has not finished; idempotent."""
        if self._forget(stream.request.id) is not None and not stream.finished:
            self._abort([stream.request.id], stream.rank, stream.incarnation)

    # -- events ----------------------------------------------------------------------------------

    def greeting(self, sender: bytes, greeting: EngineGreeting, now: float) -> None:
        """An engine says that its request route is open; it repeats that as a sign of life."""
        rank, incarnation = greeting.rank, greeting.incarnation
        if self.state.greeted(rank, incarnation, sender, greeting.session, now):
            self._send_again(rank, incarnation, now)
        address = self.state.address_of(rank)
        if address is not None and address[0] == incarnation:
            for stream in self.in_flight.values():  # it was only silent
                stream.in_doubt.discard((rank, incarnation))
                stream.died_on.discard((rank, incarnation))
                stream.silent_on.discard((rank, incarnation))
        if greeting.asks and self.state.routes_to(rank, incarnation):
            self._transmit(sender, RouteTaken(greeting.session))
        self._find_homes(now)
        self._settle(now)

    def step_outputs(self, message: StepOutputs, now: float) -> None:
        """Tokens of an engine, with its stats."""
        stats = message.stats
        order = self.state.outputs_arrived(stats)
        self.state.observe(stats, now)
        self._note_wake(stats.running + stats.waiting > 0 or bool(message.outputs), now)
        stale = []
        for output in message.outputs if order >= 0 else ():
            stream = self.in_flight.get(output.id)
            if stream is not None and stream.runs_on(stats.rank, stats.incarnation) and order == 0:
                self._deliver(stream, output, now)
            elif output.finish_reason is None and stream is None:
                stale.append(output.id)  # has moved on, or was aborted by nobody it heard
        if stale:
            self._abort(stale, stats.rank, stats.incarnation)
        if order > 0:
            self._send_again(stats.rank, stats.incarnation, now)
        self._settle(now)

    def engine_died(self, message: EngineDead, now: float) -> None:
        """Last words of an engine."""
        logger.error("engine %d died: %s", message.rank, message.reason)
        self._engines_lost(self.state.lost(message.rank, message.incarnation), now)
        self._find_homes(now)
        self._settle(now)

    def out_of_reach(self, rank: int, incarnation: int, now: float) -> None:
        """A message could not be sent to an engine."""
        self._out_of_reach += self.state.out_of_reach(rank, incarnation)
        self._settle(now)

    def view_changed(self, view: ClusterView, now: float) -> list[EngineLost]:
        """Take a cluster view from the coordinator; return the engines that have gone."""
        lost = self.state.update_view(view, now)
        self._note_wake(view.running, now)
        self._engines_lost(lost, now)
        self._replaced(view)
        self._find_homes(now)
        self._settle(now)
        return lost

    def tick(self, now: float) -> list[EngineLost]:
        """Time has passed; return the engines that have gone."""
        lost = self.state.tick(now)
        self._engines_lost(lost, now)
        self._out_of_reach += self.state.unheard(now)
        self._settle(now)
        self._find_homes(now)
        for id_, since in list(self._homeless.items()):
            if now - since > self._resume_timeout:
                self._give_up(id_, "the engine died and no other could take the request over")
        return lost

    # -- sending ---------------------------------------------------------------------------------

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _choose(self, request: AddRequest, pinned_rank: int | None = None) -> Choice:
        if pinned_rank is not None:
            if pinned_rank >= self.state.num_ranks:
                raise NoSuchEngine(f"there is no engine {pinned_rank}")
            if not self.state.loads(lambda rank: rank == pinned_rank):
                raise NoEngineAvailable(f"engine {pinned_rank} cannot serve now")
            return Choice(pinned_rank, "pinned")
        loads = self.state.loads()
        if not loads:
            raise NoEngineAvailable("no engine can serve now")
        return self._policy.choose(
            loads,
            request.prompt_token_ids,
            self.state.unseen_front_ends,
            cache_root=request.cache_root,
        )

    def _send(self, stream: RequestStream, choice: Choice, now: float) -> None:
        """Send a request to the chosen engine, or to the next best if that one has just died."""
        while True:
            rank = choice.rank
            address = self.state.address_of(rank)
            assert address is not None, f"engine {rank} was offered without a route"
            incarnation, identity = address
            stream.rank, stream.incarnation = rank, incarnation
            was_paused = self.state.paused
            message = stream.message(self.state.wave)
            if not self._transmit(identity, message):
                logger.warning("engine %d cannot be reached", rank)
                # Others that are in flight there are moved after this one has found its place.
                self._out_of_reach += self.state.out_of_reach(rank, incarnation)
                stream.rank = -1
                choice = self._choose(stream.request)
                continue
            self.state.sent(rank, message.num_tokens)
            stream.times.sent(rank, now)
            self._metrics.routing_decision(rank, choice.reason)
            if logger.isEnabledFor(logging.DEBUG):
                name = message.request_id
                fields = {"request_id": name, "engine": rank, "reason": choice.reason}
                logger.debug("request %s goes to engine %d", name, rank, extra=fields)
            if was_paused:
                self._wake_up(rank, now)
            return

    def _wake_up(self, rank: int, now: float) -> None:
        if self._woken_at is None:
            self._woken_at = now
        self._notify(WakeUp(self._front_end, rank, self.state.wave))

    def _note_wake(self, running: bool, now: float) -> None:
        if running and self._woken_at is not None:
            self._metrics.observe_wake(now - self._woken_at)
            self._woken_at = None

    def _abort(self, ids: list[int], rank: int, incarnation: int) -> None:
        address = self.state.address_of(rank)
        if address is None or address[0] != incarnation:
            return
        if not self._transmit(address[1], AbortRequests(ids)):
            logger.debug("engine %d went before an abort reached it", rank)

    # -- receiving -------------------------------------------------------------------------------

    def _deliver(self, stream: RequestStream, output: RequestOutput, now: float) -> None:
        if output.timing is not None:
            stream.times.said(output.timing, now, last=output.finish_reason is not None)
        if output.finish_reason is not None:
            self._forget(output.id)
        stream.put(output)

    def _forget(self, id_: int) -> RequestStream | None:
        """Drop a request that has ended, for whatever reason; None if it is not known."""
        self._homeless.pop(id_, None)
        stream = self.in_flight.pop(id_, None)
        if not self.in_flight:
            self._on_idle()
        return stream

    # -- engines that come and go ----------------------------------------------------------------

    def _running_on(self, rank: int, incarnation: int) -> list[RequestStream]:
        return [each for each in self.in_flight.values() if each.runs_on(rank, incarnation)]

    def _settle(self, now: float) -> None:
        """See to what the event just handled turned out to have broken."""
        for rank, incarnation in self.state.take_broken():
            self._send_again(rank, incarnation, now)
        while self._out_of_reach:
            engine = self._out_of_reach.pop()
            stranded = self._running_on(engine.rank, engine.incarnation)
            if stranded:
                logger.warning(
                    "engine %d is out of reach: moving %d requests", engine.rank, len(stranded)
                )
            for stream in stranded:
                # It may have died, and of this request: only its return or its end will tell. If a
                # connection broke that is known soon; if it fell silent nobody can wait for it.
                self._leave(stream)
                left = stream.silent_on if engine.was_silent else stream.in_doubt
                left.add((engine.rank, engine.incarnation))
                self._move(stream, now)

    def _engines_lost(self, lost: list[EngineLost], now: float) -> None:
        for each in lost:
            engine = (each.rank, each.incarnation)
            stranded = self._running_on(*engine)
            if stranded:
                logger.warning("engine %d has gone: moving %d requests", each.rank, len(stranded))
            for stream in list(self.in_flight.values()):
                ran_there = stream.runs_on(*engine)
                if not ran_there and engine not in stream.in_doubt | stream.silent_on:
                    continue
                stream.in_doubt.discard(engine)
                stream.silent_on.discard(engine)
                (stream.silent_on if each.was_silent else stream.died_on).add(engine)
                if ran_there:
                    self._leave(stream)
                    self._move(stream, now)
                elif len(stream.died_on) > self._max_resumes:
                    self._suspect(stream)

    def _replaced(self, view: ClusterView) -> None:
        """Engines that fell silent have died if others are in their places now."""
        incarnations = {entry.rank: entry.incarnation for entry in view.engines}
        for stream in list(self.in_flight.values()):
            for rank, incarnation in list(stream.silent_on):
                if incarnations.get(rank, incarnation) != incarnation:
                    stream.silent_on.discard((rank, incarnation))
                    stream.died_on.add((rank, incarnation))
            if len(stream.died_on) > self._max_resumes:
                self._suspect(stream)

    def _send_again(self, rank: int, incarnation: int, now: float) -> None:
        """Send the requests of a living engine anew, because it or its answers were not heard."""
        again = self._running_on(rank, incarnation)
        self.state.forget_unreceived(rank)
        logger.warning(
            "messages to or of engine %d were lost: sending %d requests again", rank, len(again)
        )
        if again:
            self._abort([stream.request.id for stream in again], rank, incarnation)
        for stream in again:
            self._rehome(stream, now)

    def _leave(self, stream: RequestStream) -> None:
        """Spare an engine that may only be silent the work, should it hear again."""
        identity = self.state.greeted_from(stream.rank, stream.incarnation)
        if identity is not None:
            self._transmit(identity, AbortRequests([stream.request.id]))

    def _move(self, stream: RequestStream, now: float) -> None:
        stream.rank = -1
        if len(stream.died_on) > self._max_resumes:
            self._suspect(stream)
            return
        self._metrics.request_resumed()
        self._rehome(stream, now)

    def _suspect(self, stream: RequestStream) -> None:
        logger.error(
            "request %s was in flight on %d engines that died: not tried again",
            stream.request.request_id,
            len(stream.died_on),
            extra={"request_id": stream.request.request_id},
        )
        self._abort([stream.request.id], stream.rank, stream.incarnation)
        self._give_up(
            stream.request.id,
            f"the request was in flight on {len(stream.died_on)} engines that died and is "
            "suspected to be the reason; it is not tried again",
        )

    def _give_up(self, id_: int, why: str) -> None:
        stream = self._forget(id_)
        assert stream is not None, f"request {id_} is given up but not known"
        stream.fail(NoEngineAvailable(why))

    def _find_homes(self, now: float) -> None:
        if self.state.ready:
            for id_ in list(self._homeless):
                if id_ in self._homeless:
                    self._rehome(self.in_flight[id_], now)

    def _rehome(self, stream: RequestStream, now: float) -> None:
        """Send a request anew; it waits if no engine can take it, or if none should yet."""
        stream.times.left(now)
        old = stream.request.id
        since = self._homeless.pop(old, now)
        del self.in_flight[old]
        stream.rank = -1
        stream.request = msgspec.structs.replace(stream.request, id=self._new_id())
        self.in_flight[stream.request.id] = stream
        suspected = len(stream.died_on | stream.in_doubt) > self._max_resumes
        try:
            if suspected:
                raise NoEngineAvailable("it may have killed engines, and has to wait to be cleared")
            self._send(stream, self._choose(stream.request), now)
        except NoEngineAvailable:
            stream.rank = -1
            self._homeless[stream.request.id] = since
