"""`GenerationClient` over real sockets: routes requests to engines and returns their outputs.

Everything runs on the front end's event loop. `server.router.router` makes the decisions; this
module owns the sockets and the clock, and performs the router's actions.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from engine.shared.messages import (
    AdapterOutcome,
    AdapterRequest,
    AddRequest,
    ClusterView,
    EngineInput,
    EngineOutput,
    FleetOrder,
    FleetRequest,
    FrontEndNotice,
    KvSource,
    RouteHello,
    UtilityResult,
    UtilityValue,
    encode,
)
from engine.shared.transport import Inbox
from server.router.adapters import Adapters
from server.router.events import EngineHello, Event, Tick
from server.router.generation_client import KvOffer, NoEngineAvailable
from server.router.router import Router
from server.router.shell import ClientMetrics, RouterShell
from server.router.token_stream import RequestStream, UnreadOutputs

logger = logging.getLogger(__name__)

UTILITY_TIMEOUT = 120.0
"""Default timeout of a utility call in seconds; waking up can mean loading a model."""

FLEET_INTERVAL = 0.05
"""Seconds between polls of the engines' progress with a fleet order."""

MAX_HELD = 1024
"""Maximum requests held while there is no engine; further ones get 503 immediately."""

FIRST_CONNECT_TIMEOUT = 5.0
"""Seconds that a front end's first requests wait for it to connect to the engines."""

TICK_INTERVAL = 1.0
"""Seconds between checks for members and requests that have waited too long."""

BLOCK_QUERY_INTERVAL = 0.1
"""Seconds between requests to engines for changes of their KV blocks."""


class EngineClient:
    """A front end's two sockets to all engines, around its `Router`.

    Args:
        notify: sends a notice to the coordinator.
        requests, outputs: bound ROUTER and PULL sockets that engines connect to; closed here.
        min_ready_engines: number of usable engines required for `ready` to become true.
        cold_start_timeout: seconds for which requests are held while there is no engine; above 0
            the client is ready without engines.
    """

    def __init__(
        self,
        *,
        front_end: int,
        router: Router,
        metrics: ClientMetrics,
        notify: Callable[[FrontEndNotice], None],
        requests: "zmq.Socket[bytes]",
        outputs: "zmq.Socket[bytes]",
        min_ready_engines: int = 1,
        cold_start_timeout: float = 0.0,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._notify = notify
        self.adapters = Adapters(front_end, router.members.incarnation)
        """Adapters that requests can name."""
        self._operator_requests: dict[
            int, tuple[AdapterRequest | FleetRequest, asyncio.Future[Any]]
        ] = {}
        """Requests to the coordinator and the futures of their answers, by ticket."""
        self.fleet: FleetOrder | None = None
        """The newest fleet order known here."""
        self._idle = asyncio.Event()
        self._shell = RouterShell(
            router,
            send=self._send,
            notify=notify,
            on_idle=self._idle.set,
            metrics=metrics,
            clock=time.monotonic,
        )
        self._requests = Inbox(requests, RouteHello, "requests")
        self._outputs = Inbox(outputs, EngineOutput, "outputs")
        # Sends to unknown peers must fail instead of being dropped, and a reconnecting engine must
        # not be rejected because of its old connection.
        requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        requests.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._min_ready_engines = min_ready_engines
        self._cold_start_timeout = cold_start_timeout
        self._num_held = 0
        self._engine_connected = asyncio.Event()
        self._became_ready = asyncio.Event()
        self._reached_engines = asyncio.Event()
        if cold_start_timeout:
            self._became_ready.set()
            metrics.count("held_request_seconds", by=0)  # so that the series exists
        self._draining = False
        self._loop = asyncio.get_running_loop()
        self._requests.attach(
            self._loop, lambda sender, hello: self._handle(EngineHello(sender, hello))
        )
        self._outputs.attach(self._loop, lambda _sender, message: self._handle(message))
        self._timer = self._loop.call_later(TICK_INTERVAL, self._tick)
        self._block_query_timer: asyncio.TimerHandle | None = None
        if router.index is not None:
            self._query_blocks()
        self._first_connect_timer = self._loop.call_later(
            FIRST_CONNECT_TIMEOUT, self._reached_engines.set
        )

    # -- GenerationClient ------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        members = self._router.members
        holds = bool(self._cold_start_timeout) and not members.has_engines
        serves = self._became_ready.is_set() and (members.ready or holds)
        return serves and not self._draining

    def check_accepts_requests(self) -> None:
        if self._draining:
            raise _shutting_down()
        if not self._router.members.has_engines:
            raise NoEngineAvailable("No engine can serve now; try again.")

    @property
    def max_model_len(self) -> int:
        length = self._router.members.max_model_len
        if length is None:
            raise NoEngineAvailable("No engine can serve now; try again.")
        return length

    @property
    def serves_images(self) -> bool:
        return self._router.members.serves_images

    @property
    def needs_original_images(self) -> bool:
        return self._router.members.needs_original_images

    @property
    def num_slots(self) -> int:
        return self._router.members.num_slots

    @property
    def view(self) -> ClusterView | None:
        return self._router.members.view

    @property
    def view_age(self) -> float | None:
        return self._router.members.view_age(time.monotonic())

    def weight_version(self, rank: int) -> str:
        route = self._router.members.routes.get(rank)
        stats = None if route is None else route.stats
        return "" if stats is None else stats.weight_version

    @property
    def kv_offers(self) -> dict[int, KvOffer]:
        found = {}
        for rank, route in self._router.members.routes.items():
            setup = route.entry.setup
            if setup is not None and setup.kv_address:
                source = KvSource(setup.kv_address, route.entry.incarnation)
                found[rank] = KvOffer(source, setup.block_size)
        return found

    @property
    def stats_age(self) -> dict[int, float]:
        return self._router.members.stats_age(time.monotonic())

    def submit(
        self,
        message: AddRequest,
        pinned_rank: int | None = None,
        unread: UnreadOutputs | None = None,
    ) -> RequestStream:
        if self._draining:
            raise _shutting_down()
        return self._shell.submit(message, pinned_rank, unread)

    async def call_utility(
        self,
        rank: int | None,
        name: str,
        arguments: dict[str, UtilityValue],
        within: float = UTILITY_TIMEOUT,
    ) -> list[UtilityResult]:
        answers: asyncio.Future[list[UtilityResult]] = self._loop.create_future()

        def answered(results: list[UtilityResult]) -> None:
            if not answers.done():
                answers.set_result(results)

        call_id, why = self._shell.call(rank, name, arguments, answered), f"within {within:g} s"
        timer = self._loop.call_later(within, self._shell.call_overdue, call_id, why)
        try:
            return await answers
        finally:
            timer.cancel()
            self._shell.call_overdue(call_id, why)  # a no-op unless the caller was cancelled

    async def change_adapter(
        self, name: str, path: str | None = None, in_place: bool = False
    ) -> AdapterOutcome:
        if self.adapters.table is None:
            return AdapterOutcome(0, 400, "No engine serves adapters: --enable-lora.")
        request = AdapterRequest(secrets.randbits(60), name, path, in_place)
        try:
            async with asyncio.timeout(UTILITY_TIMEOUT):
                with self._operator_request(request) as answer:
                    outcome: AdapterOutcome = await answer
                    return outcome
        except TimeoutError:
            reason = f"Not all engines and front ends had finished after {UTILITY_TIMEOUT:g} s."
            return AdapterOutcome(request.ticket, 503, reason)

    async def order_fleet(self, request: FleetRequest) -> list[UtilityResult]:
        missing = "the coordinator has not taken the order"
        try:
            async with asyncio.timeout(UTILITY_TIMEOUT):
                with self._operator_request(request) as answer:
                    revision: int = await answer
                while True:
                    # Ask the engines that are connected for their own state.
                    has_engines = self._router.members.has_engines
                    results = await self.call_utility(None, "info", {}) if has_engines else []
                    late = [each for each in results if not _followed(each, request, revision)]
                    if not late:
                        return results
                    missing = f"engine {late[0].rank} has not followed yet; the order stands"
                    await asyncio.sleep(FLEET_INTERVAL)
        except TimeoutError:
            raise NoEngineAvailable(f"After {UTILITY_TIMEOUT:g} s {missing}.") from None

    @contextlib.contextmanager
    def _operator_request(
        self, request: AdapterRequest | FleetRequest
    ) -> Iterator[asyncio.Future[Any]]:
        """Send a request to the coordinator, and repeat it with each tick until it is answered."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._operator_requests[request.ticket] = request, answer
        self._notify(request)
        try:
            yield answer
        finally:
            del self._operator_requests[request.ticket]

    def _answer(self, ticket: int, answer: AdapterOutcome | int) -> None:
        _, waiting = self._operator_requests.get(ticket, (None, None))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _report_adapters(self) -> None:
        notice = self.adapters.notice(time.monotonic())
        if notice is not None:
            self._notify(notice)

    async def drain(self, within: float) -> int:
        """Reject new sequences, wait for those in flight, then fail the rest.

        Returns how many were unfinished after `within` seconds.
        """
        self._draining = True
        self._reached_engines.set()
        self._engine_connected.set()
        self._idle.clear()
        if self._router.delivery.in_flight:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), within)
        unfinished = len(self._router.delivery.in_flight)
        self._shell.fail_all(_shutting_down())
        return unfinished

    @property
    def reaches_engines(self) -> bool:
        return self._reached_engines.is_set() and (
            not self._cold_start_timeout or self._router.members.has_engines
        )

    async def wait_for_engines(self) -> None:
        """Wait as specified by the interface.

        This front end shares its listening socket with others on its node, so it gets requests as
        soon as it listens. Without any engine, up to `MAX_HELD` requests wait for
        `cold_start_timeout`.
        """
        await self._reached_engines.wait()
        if self.reaches_engines or self._draining or self._num_held >= MAX_HELD:
            return
        self._engine_connected.clear()
        self._num_held += 1
        try:
            async with asyncio.timeout(self._cold_start_timeout):
                await self._engine_connected.wait()
        except TimeoutError:
            reason = f"No engine came within {self._cold_start_timeout:g} s; try again."
            raise NoEngineAvailable(reason) from None
        finally:
            self._num_held -= 1

    async def wait_until_ready(self) -> None:
        """Wait until `min_ready_engines` engines can serve."""
        await self._became_ready.wait()

    # -- events and actions ----------------------------------------------------------------------

    def view_changed(self, view: ClusterView) -> None:
        """Apply a cluster view from the coordinator."""
        outcomes = self.adapters.take(view.adapters)
        self._report_adapters()
        order = view.fleet
        # A restarted coordinator can know less.
        if order is not None and (self.fleet is None or order.revision >= self.fleet.revision):
            self.fleet = order
            for ticket in order.tickets:
                self._answer(ticket, order.revision)
        self._handle(view)
        for each in outcomes:
            self._answer(each.ticket, each)

    def _tick(self) -> None:
        self._handle(Tick())
        if self._num_held:
            self._metrics.count("held_request_seconds", by=self._num_held * TICK_INTERVAL)
        self._report_adapters()
        for request, answer in self._operator_requests.values():
            if not answer.done():
                self._notify(request)
        self._timer = self._loop.call_later(TICK_INTERVAL, self._tick)

    def _query_blocks(self) -> None:
        self._shell.query_blocks()
        self._block_query_timer = self._loop.call_later(BLOCK_QUERY_INTERVAL, self._query_blocks)

    def _handle(self, event: Event) -> None:
        self._shell.handle(event)
        members = self._router.members
        if self._num_held and members.has_engines:
            self._engine_connected.set()
        if self._became_ready.is_set() and self._reached_engines.is_set():
            return
        if members.reaches_engines:
            self._reached_engines.set()
        if sum(route.is_usable for route in members.routes.values()) >= self._min_ready_engines:
            self._became_ready.set()

    def _send(self, to: bytes, message: EngineInput) -> bool:
        try:
            self._requests.send(to, encode(message))
        except zmq.ZMQError as error:
            logger.debug("cannot send to %r: %s", to, error)
            return False
        return True

    def close(self) -> None:
        """Stop receiving and close the sockets."""
        self._timer.cancel()
        if self._block_query_timer is not None:
            self._block_query_timer.cancel()
        self._first_connect_timer.cancel()
        for inbox in (self._requests, self._outputs):
            inbox.close()


def _followed(result: UtilityResult, request: FleetRequest, revision: int) -> bool:
    info = result.result
    if result.error is not None or not isinstance(info, dict):
        return False
    done = int(info.get("fleet_revision") or 0) >= revision
    return done and (request.action != "pause" or bool(info["is_paused"]))


def _shutting_down() -> NoEngineAvailable:
    return NoEngineAvailable("This server is shutting down; send the request again.")
