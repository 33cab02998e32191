"""Routes requests to engines and their outputs back: `GenerationClient` over real sockets.

Everything runs on the front end's event loop. What decides (loads, who is lost) is in
`server.cluster_state` and `server.routing`; this module sends, receives and keeps the requests
in flight.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Protocol

import zmq

from engine.messages import (
    AbortRequests,
    AddRequest,
    ClusterView,
    EngineDead,
    EngineGreeting,
    EngineOutput,
    FrontEndNotice,
    RequestOutput,
    SamplingParams,
    StepOutputs,
    UtilityCall,
    UtilityResult,
    UtilityValue,
    WakeUp,
    encode,
)
from engine.transport import Inbox
from server.cluster_state import ClusterState, EngineLost
from server.generation_client import NoEngineAvailable
from server.routing import Choice, RoutingPolicy
from server.token_stream import RequestStream
from server.utility_calls import UtilityCalls

logger = logging.getLogger(__name__)

UTILITY_TIMEOUT = 120.0
"""Seconds that an engine may take for a utility; waking up may mean loading a model."""

TICK_INTERVAL = 1.0
"""Seconds between checks for members and requests that have waited for too long."""


class ClientMetrics(Protocol):
    """What the engine client counts."""

    def routing_decision(self, rank: int, reason: str) -> None: ...

    def request_resumed(self) -> None: ...

    def observe_wake(self, seconds: float) -> None: ...


class EngineClient:
    """Sends each request to the least-loaded engine and keeps it until it ends."""

    def __init__(
        self,
        *,
        front_end: int,
        state: ClusterState,
        policy: RoutingPolicy,
        metrics: ClientMetrics,
        requests: "zmq.Socket[bytes]",
        outputs: "zmq.Socket[bytes]",
        max_resumes: int,
        resume_timeout: float,
    ) -> None:
        self._front_end = front_end
        self._state = state
        self._policy = policy
        self._metrics = metrics
        self._requests = Inbox(requests, EngineGreeting, "requests")
        self._outputs = Inbox(outputs, EngineOutput, "outputs")
        self._max_resumes = max_resumes
        self._resume_timeout = resume_timeout
        # Unknown peers must raise instead of swallowing a request, and an engine that connects
        # again must not be shut out by its own old connection.
        requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        requests.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._in_flight: dict[int, RequestStream] = {}
        self._utilities = UtilityCalls()
        self._homeless: dict[int, float] = {}
        self._next_id = secrets.randbits(42) << 20
        self._notify_coordinator = _no_coordinator
        self._woken_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._requests.attach(self._loop, self._greeting)
        self._outputs.attach(self._loop, self._output)
        self._timer = self._loop.call_later(TICK_INTERVAL, self._tick)
        self._became_ready = asyncio.Event()
        self._draining = False
        self._idle = asyncio.Event()

    def connect_coordinator(self, notify: "_Notify") -> None:
        """Set the way for wake-up notices."""
        self._notify_coordinator = notify

    # -- GenerationClient ------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._state.ready and not self._draining

    @property
    def max_model_len(self) -> int:
        length = self._state.max_model_len
        if length is None:
            raise NoEngineAvailable("no engine has joined yet")
        return length

    @property
    def num_slots(self) -> int:
        return self._state.num_slots

    @property
    def view(self) -> ClusterView | None:
        return self._state.view

    @property
    def stats_age(self) -> dict[int, float]:
        return self._state.stats_age(time.monotonic())

    @property
    def num_in_flight(self) -> int:
        """Requests of this front end that have not ended."""
        return len(self._in_flight)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        pinned_rank: int | None = None,
    ) -> RequestStream:
        """Route one sequence to an engine and return its stream."""
        if self._draining:
            raise NoEngineAvailable("this server is shutting down")
        choice = self._choose(prompt_token_ids, pinned_rank)
        self._next_id += 1
        request = AddRequest(
            id=self._next_id,
            request_id=request_id,
            front_end=self._front_end,
            wave=self._state.wave,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            priority=priority,
        )
        stream = RequestStream(request, self._close)
        self._send(stream, choice)
        self._in_flight[request.id] = stream
        return stream

    async def call_utility(
        self,
        rank: int | None,
        name: str,
        arguments: dict[str, UtilityValue],
        within: float = UTILITY_TIMEOUT,
    ) -> list[UtilityResult]:
        """Call a utility of one engine, or of all with rank None; return their answers.

        An engine that dies meanwhile, or takes more than `within` seconds, answers an error.

        Raises:
            NoEngineAvailable: there is no such engine now.
        """
        ranks = [load.rank for load in self._state.loads() if rank in (None, load.rank)]
        if not ranks:
            which = "no engine can" if rank is None else f"engine {rank} cannot"
            raise NoEngineAvailable(f"{which} be called now")
        call_id = self._utilities.new_id()
        call = encode(UtilityCall(call_id, self._front_end, name, arguments))
        for each in ranks:
            incarnation, identity = self._address(each)
            self._utilities.expect(call_id, each)
            try:
                self._requests.send(identity, call)
            except zmq.ZMQError as error:
                logger.warning("engine %d cannot be reached: %s", each, error)
                lost = self._state.lost(each, incarnation)
                self._loop.call_soon(self._engines_lost, lost)
        return await asyncio.gather(
            *(self._utilities.answer(call_id, each, within) for each in ranks)
        )

    async def drain(self, within: float) -> int:
        """Take no new requests and wait until those in flight have ended.

        Returns how many had not ended after `within` seconds.
        """
        self._draining = True
        self._idle.clear()
        if self._in_flight:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), within)
        return len(self._in_flight)

    async def wait_until_ready(self) -> None:
        """Wait until at least one engine can serve."""
        await self._became_ready.wait()

    # -- sending ---------------------------------------------------------------------------------

    def _choose(self, prompt_token_ids: list[int], pinned_rank: int | None = None) -> Choice:
        if pinned_rank is not None:
            if not self._state.loads(lambda rank: rank == pinned_rank):
                raise NoEngineAvailable(f"engine {pinned_rank} cannot serve now")
            return Choice(pinned_rank, "pinned")
        loads = self._state.loads()
        if not loads:
            raise NoEngineAvailable("no engine can serve now")
        return self._policy.choose(loads, prompt_token_ids)

    def _send(self, stream: RequestStream, choice: Choice) -> None:
        """Send a request to the chosen engine, or to the next best if that one has just died."""
        while True:
            incarnation, identity = self._address(choice.rank)
            stream.rank, stream.incarnation = choice.rank, incarnation
            was_paused = self._state.paused
            message = stream.message(self._state.wave)
            try:
                self._requests.send(identity, encode(message))
            except zmq.ZMQError as error:
                logger.warning("engine %d cannot be reached: %s", choice.rank, error)
                # Others that were in flight there are moved after this one has found its place.
                self._loop.call_soon(self._engines_lost, [EngineLost(choice.rank, incarnation)])
                self._state.lost(choice.rank, incarnation)
                choice = self._choose(stream.request.prompt_token_ids)
                continue
            self._state.sent(choice.rank, message.num_tokens)
            self._metrics.routing_decision(choice.rank, choice.reason)
            if logger.isEnabledFor(logging.DEBUG):
                name = message.request_id
                fields = {"request_id": name, "engine": choice.rank, "reason": choice.reason}
                logger.debug("request %s goes to engine %d", name, choice.rank, extra=fields)
            if was_paused:
                self._wake_up(choice.rank)
            return

    def _address(self, rank: int) -> tuple[int, bytes]:
        address = self._state.address_of(rank)
        assert address is not None, f"engine {rank} was offered without a route"
        return address

    def _wake_up(self, rank: int) -> None:
        if self._woken_at is None:
            self._woken_at = time.monotonic()
        self._notify_coordinator(WakeUp(self._front_end, rank, self._state.wave))

    def _close(self, stream: RequestStream) -> None:
        id_ = stream.request.id
        if self._forget(id_) is None:
            return
        if not stream.finished:
            self._abort(id_, stream.rank, stream.incarnation)

    def _abort(self, id_: int, rank: int, incarnation: int) -> None:
        address = self._state.address_of(rank)
        if address is None or address[0] != incarnation:
            return
        try:
            self._requests.send(address[1], encode(AbortRequests([id_])))
        except zmq.ZMQError:
            logger.debug("engine %d went before an abort reached it", rank)

    def _forget(self, id_: int) -> RequestStream | None:
        """Drop a request that has ended, for whatever reason; None if it is not known."""
        stream = self._in_flight.pop(id_, None)
        self._homeless.pop(id_, None)
        if not self._in_flight:
            self._idle.set()
        return stream

    # -- receiving -------------------------------------------------------------------------------

    def _greeting(self, sender: bytes, greeting: EngineGreeting) -> None:
        rank, incarnation = greeting.rank, greeting.incarnation
        if self._state.greeted(rank, incarnation, sender):
            for stream in list(self._in_flight.values()):
                if stream.runs_on(rank, incarnation):
                    self._send(stream, Choice(rank, "sent_again"))
        self._engines_changed()

    def _output(self, _sender: bytes, message: StepOutputs | UtilityResult | EngineDead) -> None:
        if isinstance(message, StepOutputs):
            stats = message.stats
            self._state.observe(stats, time.monotonic())
            self._note_wake(stats.running + stats.waiting > 0 or bool(message.outputs))
            for output in message.outputs:
                self._deliver(output, stats.rank, stats.incarnation)
        elif isinstance(message, UtilityResult):
            self._utilities.answered(message)
        else:
            logger.error("engine %d died: %s", message.rank, message.reason)
            self._engines_lost(self._state.lost(message.rank, message.incarnation))

    def _deliver(self, output: RequestOutput, rank: int, incarnation: int) -> None:
        stream = self._in_flight.get(output.id)
        if stream is None:
            return
        if not stream.runs_on(rank, incarnation):
            # The engine had been given up for dead and is not: the request has moved on.
            self._abort(output.id, rank, incarnation)
            return
        if output.finish_reason is not None:
            self._forget(output.id)
        stream.put(output)

    def view_changed(self, view: ClusterView) -> None:
        """Take a cluster view from the coordinator."""
        lost = self._state.update_view(view, time.monotonic())
        self._note_wake(view.running)
        self._engines_lost(lost)
        self._engines_changed()

    def _note_wake(self, running: bool) -> None:
        if running and self._woken_at is not None:
            self._metrics.observe_wake(time.monotonic() - self._woken_at)
            self._woken_at = None

    # -- engines that come and go ----------------------------------------------------------------

    def _engines_changed(self) -> None:
        if not self._state.ready:
            return
        self._became_ready.set()
        for id_ in list(self._homeless):
            self._rehome(self._in_flight[id_])

    def _engines_lost(self, lost: list[EngineLost]) -> None:
        for engine in lost:
            self._utilities.engine_lost(engine.rank)
            stranded = [
                stream
                for stream in self._in_flight.values()
                if stream.runs_on(engine.rank, engine.incarnation)
            ]
            if stranded:
                logger.warning("engine %d has gone: moving %d requests", engine.rank, len(stranded))
            for stream in stranded:
                self._move(stream)

    def _move(self, stream: RequestStream) -> None:
        stream.resumes += 1
        stream.rank = -1
        if stream.resumes > self._max_resumes:
            self._forget(stream.request.id)
            logger.error(
                "request %s was in flight on %d engines that died: not tried again",
                stream.request.request_id,
                stream.resumes,
                extra={"request_id": stream.request.request_id},
            )
            stream.fail(
                NoEngineAvailable(
                    f"the request was in flight on {stream.resumes} engines that died and is "
                    "suspected to be the reason; it is not tried again"
                )
            )
            return
        self._metrics.request_resumed()
        self._homeless[stream.request.id] = time.monotonic()
        self._rehome(stream)

    def _rehome(self, stream: RequestStream) -> None:
        try:
            self._send(stream, self._choose(stream.request.prompt_token_ids))
        except NoEngineAvailable:
            return
        self._homeless.pop(stream.request.id, None)

    def _tick(self) -> None:
        now = time.monotonic()
        self._engines_lost(self._state.tick(now))
        for id_, since in list(self._homeless.items()):
            if now - since > self._resume_timeout:
                stream = self._forget(id_)
                assert stream is not None, f"request {id_} waits for an engine but is not known"
                stream.fail(
                    NoEngineAvailable("the engine died and no other could take the request over")
                )
        self._timer = self._loop.call_later(TICK_INTERVAL, self._tick)

    def close(self) -> None:
        """Stop receiving and close the sockets."""
        self._timer.cancel()
        for inbox in (self._requests, self._outputs):
            inbox.close()


class _Notify(Protocol):
    def __call__(self, notice: FrontEndNotice) -> None: ...


def _no_coordinator(notice: FrontEndNotice) -> None:
    logger.debug("no coordinator to send %s to", notice)
