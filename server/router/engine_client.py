"""Routes requests to engines and their outputs back: `GenerationClient` over real sockets.

Everything runs on the front end's event loop. What decides is in `server.router.dispatch`; this
module owns the sockets and the clock.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Protocol

import zmq

from engine.shared.messages import (
    ClusterView,
    EngineDead,
    EngineInput,
    EngineOutput,
    FrontEndNotice,
    RouteHello,
    SamplingParams,
    StepOutputs,
    UtilityCall,
    UtilityResult,
    UtilityValue,
    encode,
)
from engine.shared.transport import Inbox
from server.router.dispatch import Dispatcher
from server.router.generation_client import NoEngineAvailable
from server.router.outgoing import ClientMetrics
from server.router.routing import RoutingPolicy
from server.router.state import ClusterState, EngineLost
from server.router.token_stream import RequestStream
from server.router.utility_calls import UtilityCalls

logger = logging.getLogger(__name__)

UTILITY_TIMEOUT = 120.0
"""Seconds that an engine may take for a utility; waking up may mean loading a model."""

TICK_INTERVAL = 1.0
"""Seconds between checks for members and requests that have waited for too long."""


class EngineClient:
    """A front end's two sockets to all engines, around its `Dispatcher`."""

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
        self._requests = Inbox(requests, RouteHello, "requests")
        self._outputs = Inbox(outputs, EngineOutput, "outputs")
        # Unknown peers must raise instead of swallowing a request, and an engine that connects
        # again must not be shut out by its own old connection.
        requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        requests.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._notify_coordinator = _no_coordinator
        self._idle = asyncio.Event()
        self._dispatcher = Dispatcher(
            front_end=front_end,
            first_id=secrets.randbits(42) << 20,
            state=state,
            policy=policy,
            metrics=metrics,
            send=self._send,
            notify=lambda notice: self._notify_coordinator(notice),
            on_idle=self._idle.set,
            max_resumes=max_resumes,
            resume_timeout=resume_timeout,
        )
        self._utilities = UtilityCalls()
        self._became_ready = asyncio.Event()
        self._draining = False
        self._loop = asyncio.get_running_loop()
        self._requests.attach(self._loop, self._route_hello)
        self._outputs.attach(self._loop, self._output)
        self._timer = self._loop.call_later(TICK_INTERVAL, self._tick)

    def connect_coordinator(self, notify: "_Notify") -> None:
        """Set the way for wake-up notices."""
        self._notify_coordinator = notify

    # -- GenerationClient ------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._state.ready and not self._draining

    @property
    def takes_requests(self) -> bool:
        return self._state.has_engines and not self._draining

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
        return len(self._dispatcher.in_flight)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        pinned_rank: int | None = None,
        tenant: int = 0,
        cache_root: bytes = b"",
        group: int = 0,
    ) -> RequestStream:
        """Route one sequence to an engine and return its stream."""
        if self._draining:
            raise NoEngineAvailable("this server is shutting down")
        return self._dispatcher.submit(
            request_id,
            prompt_token_ids,
            sampling,
            time.monotonic(),
            priority=priority,
            pinned_rank=pinned_rank,
            tenant=tenant,
            cache_root=cache_root,
            group=group,
        )

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
        call = UtilityCall(call_id, self._front_end, name, arguments)
        for each in ranks:
            address = self._state.address_of(each)
            assert address is not None, f"engine {each} was offered without a route"
            incarnation, identity = address
            self._utilities.expect(call_id, each, incarnation)
            if not self._send(identity, call):
                logger.warning("engine %d cannot be reached", each)
                self._dispatcher.out_of_reach(each, incarnation, time.monotonic())
                self._utilities.engine_lost(each, incarnation)
        return await asyncio.gather(
            *(self._utilities.answer(call_id, each, within) for each in ranks)
        )

    async def drain(self, within: float) -> int:
        """Take no new requests and wait until those in flight have ended.

        Returns how many had not ended after `within` seconds.
        """
        self._draining = True
        self._idle.clear()
        if self._dispatcher.in_flight:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), within)
        return len(self._dispatcher.in_flight)

    async def wait_until_ready(self) -> None:
        """Wait until at least one engine can serve."""
        await self._became_ready.wait()

    # -- sockets ---------------------------------------------------------------------------------

    def _send(self, identity: bytes, message: EngineInput) -> bool:
        try:
            self._requests.send(identity, encode(message))
        except zmq.ZMQError as error:
            logger.debug("cannot send to %r: %s", identity, error)
            return False
        return True

    def _route_hello(self, sender: bytes, route_hello: RouteHello) -> None:
        self._dispatcher.route_hello(sender, route_hello, time.monotonic())
        self._note_readiness()

    def _output(self, _sender: bytes, message: StepOutputs | UtilityResult | EngineDead) -> None:
        if isinstance(message, StepOutputs):
            self._dispatcher.step_outputs(message, time.monotonic())
        elif isinstance(message, UtilityResult):
            self._utilities.answered(message)
        else:
            self._dispatcher.engine_died(message, time.monotonic())
            self._utilities.engine_lost(message.rank, message.incarnation)

    def view_changed(self, view: ClusterView) -> None:
        """Take a cluster view from the coordinator."""
        self._engines_lost(self._dispatcher.view_changed(view, time.monotonic()))
        self._note_readiness()

    def _tick(self) -> None:
        self._engines_lost(self._dispatcher.tick(time.monotonic()))
        self._timer = self._loop.call_later(TICK_INTERVAL, self._tick)

    def _engines_lost(self, lost: list[EngineLost]) -> None:
        for engine in lost:
            self._utilities.engine_lost(engine.rank, engine.incarnation)

    def _note_readiness(self) -> None:
        if self._state.ready:
            self._became_ready.set()

    def close(self) -> None:
        """Stop receiving and close the sockets."""
        self._timer.cancel()
        for inbox in (self._requests, self._outputs):
            inbox.close()


class _Notify(Protocol):
    def __call__(self, notice: FrontEndNotice) -> None: ...


def _no_coordinator(notice: FrontEndNotice) -> None:
    logger.debug("no coordinator to send %s to", notice)
