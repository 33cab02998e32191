"""Which engine each request of a front end runs on, and what happens when engines come and go.

A state machine without I/O: events come in as calls with the time, messages go out through the
functions that it is given. `server.router.engine_client` owns the sockets, the clock and the
event loop.

A request gets a new id each time it is sent, so nothing that an earlier engine, or an earlier
connection, still says about it is taken for news.
"""

import logging
from collections.abc import Callable

import msgspec

from engine.shared.messages import (
    AddRequest,
    ClusterView,
    EngineDead,
    EngineInput,
    RequestOutput,
    RouteHello,
    RouteTaken,
    SamplingParams,
    StepOutputs,
    WakeUp,
)
from server.router.generation_client import KillsEngines, NoEngineAvailable, NoSuchEngine
from server.router.outgoing import ClientMetrics, Outgoing
from server.router.probation import CONVICTING_DEATHS, MAX_TRIES, Probation
from server.router.routing import RoutingPolicy
from server.router.state import ClusterState, EngineLost
from server.router.suspicion import Engine
from server.router.token_stream import RequestStream

logger = logging.getLogger(__name__)

PROBATION_PATIENCE = 10
"""A suspect that is neither cleared nor convicted is given up after so many `resume_timeout`s."""


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
        self._metrics = metrics
        self._transmit = send
        self._out = Outgoing(
            front_end=front_end,
            state=state,
            policy=policy,
            metrics=metrics,
            transmit=send,
            notify=notify,
        )
        self._on_idle = on_idle
        self._resume_timeout = resume_timeout
        self._unassigned: dict[int, float] = {}
        self._probation = Probation(max_resumes, PROBATION_PATIENCE * resume_timeout)

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
        group: int = 0,
    ) -> RequestStream:
        """Route one sequence to an engine and return its stream.

        Raises:
            NoEngineAvailable: no engine, or not the wished one, is there.
        """
        if pinned_rank is not None and pinned_rank >= self.state.num_ranks:
            raise NoSuchEngine(f"there is no engine {pinned_rank}")
        if not self.state.loads(lambda rank: pinned_rank in (None, rank)):
            which = "no engine can" if pinned_rank is None else f"engine {pinned_rank} cannot"
            raise NoEngineAvailable(f"{which} serve now")
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
            group=group,
        )
        stream = RequestStream(request, self.close, pinned_rank)
        self.in_flight[request.id] = stream
        self._send_or_wait(stream, now)
        self._settle(now)
        return stream

    def close(self, stream: RequestStream) -> None:
        """Forget a request, aborting it if it has not finished; idempotent."""
        if self._forget(stream.request.id) is not None and not stream.finished:
            self._out.abort([stream.request.id], stream.rank, stream.incarnation)

    # -- events ----------------------------------------------------------------------------------

    def route_hello(self, sender: bytes, route_hello: RouteHello, now: float) -> None:
        """An engine says that its request route is open; it repeats that as a sign of life."""
        rank, incarnation = route_hello.rank, route_hello.incarnation
        if self.state.heard_hello(rank, incarnation, sender, route_hello.session, now):
            self._send_again(rank, incarnation, now)
        address = self.state.address_of(rank)
        if address is not None and address[0] == incarnation:
            for stream in self.in_flight.values():  # it was only silent
                stream.suspicion.heard((rank, incarnation))
        if route_hello.asks and self.state.routes_to(rank, incarnation):
            self._transmit(sender, RouteTaken(route_hello.session))
        self._find_homes(now)
        self._settle(now)

    def step_outputs(self, message: StepOutputs, now: float) -> None:
        """Tokens of an engine, with its stats."""
        stats = message.stats
        order = self.state.outputs_arrived(stats)
        self.state.observe(stats, now)
        self._out.note_wake(stats.running + stats.waiting > 0 or bool(message.outputs), now)
        stale = []
        for output in message.outputs if order >= 0 else ():
            stream = self.in_flight.get(output.id)
            if stream is not None and stream.runs_on(stats.rank, stats.incarnation) and order == 0:
                self._deliver(stream, output, now)
            elif output.finish_reason is None and stream is None:
                stale.append(output.id)  # has moved on, or was aborted by nobody it heard
        if order == 0:
            self._probation.watch(stats)
        if stale:
            self._out.abort(stale, stats.rank, stats.incarnation)
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
        self._out.unreachable += self.state.out_of_reach(rank, incarnation)
        self._settle(now)

    def view_changed(self, view: ClusterView, now: float) -> list[EngineLost]:
        """Take a cluster view from the coordinator; return the engines that have gone."""
        lost = self.state.update_view(view, now)
        self._out.note_wake(view.running, now)
        self._engines_lost(lost, now)
        self._replaced(view, now)
        self._find_homes(now)
        self._settle(now)
        return lost

    def tick(self, now: float) -> list[EngineLost]:
        """Time has passed; return the engines that have gone."""
        lost = self.state.tick(now)
        self._engines_lost(lost, now)
        self._out.unreachable += self.state.unheard(now)
        self._settle(now)
        self._find_homes(now)
        for id_, since in list(self._unassigned.items()):
            if now - since > self._resume_timeout and not self._only_halted(self.in_flight[id_]):
                self._no_home(self.in_flight[id_])
        for stream in self._probation.overdue(now):
            self._kills_engines(stream)
        for stream in self._probation.tick():
            self._rehome(stream, now)
        self._begin_trial(now)
        return lost

    # -- sending ---------------------------------------------------------------------------------

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _send_or_wait(self, stream: RequestStream, now: float, since: float | None = None) -> None:
        """Send a request to an engine; if none can take it, it waits, as it may have `since`."""
        if not (self._probation.may_run(stream) and self._out.send(stream, now)):
            self._unassigned[stream.request.id] = now if since is None else since

    # -- receiving -------------------------------------------------------------------------------

    def _deliver(self, stream: RequestStream, output: RequestOutput, now: float) -> None:
        if output.timing is not None:
            stream.times.said(output.timing, now, last=output.finish_reason is not None)
        if output.finish_reason is not None:
            self._forget(output.id)
        stream.put(output)

    def _forget(self, id_: int) -> RequestStream | None:
        """Drop a request that has ended, for whatever reason; None if it is not known."""
        self._unassigned.pop(id_, None)
        stream = self.in_flight.pop(id_, None)
        if stream is not None and stream in self._probation:
            self._probation.drop(stream)
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
        while self._out.unreachable:
            engine = self._out.unreachable.pop()
            stranded = self._running_on(engine.rank, engine.incarnation)
            if stranded:
                logger.warning(
                    "engine %d is out of reach: moving %d requests", engine.rank, len(stranded)
                )
            for stream in stranded:
                # It may have died, and of this request: only its return or its end will tell. If a
                # connection broke that is known soon; if it fell silent nobody can wait for it.
                self._out.leave(stream)
                place = (engine.rank, engine.incarnation)
                if engine.alone == stream.request.id:
                    stream.suspicion.alone_on = place
                stream.suspicion.left(place, was_silent=engine.was_silent)
                self._move(stream, now)
        self._begin_trial(now)

    def _engines_lost(self, lost: list[EngineLost], now: float) -> None:
        for each in lost:
            engine = (each.rank, each.incarnation)
            stranded = self._running_on(*engine)
            if stranded:
                logger.warning("engine %d has gone: moving %d requests", each.rank, len(stranded))
            for stream in list(self.in_flight.values()):
                ran_there, suspicion = stream.runs_on(*engine), stream.suspicion
                if not ran_there and not suspicion.left_on(engine):
                    continue
                ran_alone = suspicion.alone_on == engine or each.alone == stream.request.id
                if ran_alone and not each.was_silent:
                    suspicion.deaths_alone += 1
                    if suspicion.deaths_alone >= CONVICTING_DEATHS:
                        self._convict(stream, engine)
                        continue
                if each.alone and not ran_alone and not each.was_silent:
                    suspicion.excused(engine)
                else:
                    suspicion.ended(engine, was_silent=each.was_silent)
                if ran_there:
                    self._out.leave(stream)
                    self._move(stream, now)
                else:
                    self._look_at(stream, now)

    def _replaced(self, view: ClusterView, now: float) -> None:
        """Engines that fell silent have died if others are in their places now."""
        incarnations = {entry.rank: entry.incarnation for entry in view.engines}
        for stream in list(self.in_flight.values()):
            if stream.suspicion.silent_on:
                stream.suspicion.replaced(incarnations)
                self._look_at(stream, now)

    def _send_again(self, rank: int, incarnation: int, now: float) -> None:
        """Send the requests of a living engine anew, because it or its answers were not heard."""
        again = self._running_on(rank, incarnation)
        self.state.forget_unreceived(rank)
        logger.warning(
            "messages to or of engine %d were lost: sending %d requests again", rank, len(again)
        )
        if again:
            self._out.abort([stream.request.id for stream in again], rank, incarnation)
        for stream in again:
            stream.suspicion.alone_on = None
            self._rehome(stream, now)

    def _move(self, stream: RequestStream, now: float) -> None:
        """A request has lost its engine: it goes to another, or waits for its turn to run alone."""
        stream.rank = -1
        if not self._look_at(stream, now):
            self._metrics.request_resumed()
            self._rehome(stream, now)

    # -- suspects --------------------------------------------------------------------------------

    def _look_at(self, stream: RequestStream, now: float) -> bool:
        """See what the deaths of engines say of a request; whether it may not run as it did."""
        probation = self._probation
        if stream not in probation:
            if not probation.is_suspect(stream):
                return False
            name, deaths = stream.request.request_id, len(stream.suspicion.died_on)
            what = "request %s was in flight on %d engines that died: it has to run alone"
            logger.warning(what, name, deaths, extra={"request_id": name})
            self._out.abort([stream.request.id], stream.rank, stream.incarnation)
            probation.add(stream, now)
            self._renumber(stream, now)
        elif stream.suspicion.tries >= MAX_TRIES:
            self._kills_engines(stream)
        elif stream.rank < 0 and stream is probation.on_trial:
            probation.broke_off(stream)
            self._renumber(stream, now)
        return True

    def _begin_trial(self, now: float) -> None:
        """Send the next suspect to an engine, to run alone, if it is time for one."""
        if self._probation and (stream := self._probation.next()) is not None:
            self._rehome(stream, now)
            self._settle(now)

    def _convict(self, stream: RequestStream, engine: Engine) -> None:
        """An engine died of a request that ran alone: others did not kill the engines before."""
        stream.suspicion.alone_on = engine
        self._probation.convicted(stream, self.in_flight.values())
        self._kills_engines(stream)

    def _kills_engines(self, stream: RequestStream) -> None:
        name, why = stream.request.request_id, stream.suspicion.says()
        logger.error("request %s: %s", name, why, extra={"request_id": name})
        self._end(stream.request.id, KillsEngines(why))

    # -- requests without an engine --------------------------------------------------------------

    def _end(self, id_: int, error: NoEngineAvailable | KillsEngines) -> None:
        stream = self._forget(id_)
        assert stream is not None, f"request {id_} is ended but not known"
        self._out.abort([id_], stream.rank, stream.incarnation)
        stream.fail(error)

    def _no_home(self, stream: RequestStream) -> None:
        why = "the engine died and no other could take the request over"
        if stream.pinned_rank is not None:
            why = (
                f"engine {stream.pinned_rank}, the only one that may run the request, has gone "
                f"and was not back within {self._resume_timeout:g} s"
            )
        self._end(stream.request.id, NoEngineAvailable(why))

    def _only_halted(self, stream: RequestStream) -> bool:
        """Whether a request waits only because all engines are halted."""
        return stream.pinned_rank is None and self.state.has_engines and not self.state.ready

    def _find_homes(self, now: float) -> None:
        ready = self.state.ready
        for id_ in list(self._unassigned):
            stream = self.in_flight.get(id_)
            if stream is not None and (ready or stream.pinned_rank is not None):
                self._rehome(stream, now)
        if ready:
            for rank, incarnation in self.state.handing_over:
                self._hand_over(rank, incarnation, now)

    def _hand_over(self, rank: int, incarnation: int, now: float) -> None:
        """Send what a halted engine holds to others, as its operator wishes: nobody has died."""
        moving = [each for each in self._running_on(rank, incarnation) if each.pinned_rank is None]
        if moving:
            logger.info("engine %d is halted: moving %d requests", rank, len(moving))
            self._out.abort([stream.request.id for stream in moving], rank, incarnation)
        for stream in moving:
            self._rehome(stream, now)

    def _renumber(self, stream: RequestStream, now: float) -> None:
        """Let a request run nowhere, and nothing that is still said of it count."""
        stream.times.left(now)
        del self.in_flight[stream.request.id]
        self._unassigned.pop(stream.request.id, None)
        stream.rank = -1
        stream.request = msgspec.structs.replace(stream.request, id=self._new_id())
        self.in_flight[stream.request.id] = stream

    def _rehome(self, stream: RequestStream, now: float) -> None:
        """Send a request anew; it waits if no engine can take it, or if none should yet."""
        since = self._unassigned.get(stream.request.id)
        self._renumber(stream, now)
        self._send_or_wait(stream, now, since)
