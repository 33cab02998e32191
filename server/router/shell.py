"""Performs a router's actions, without sockets, so that tests can supply any transport.

`server.router.engine_client` adds sockets, an event loop and a clock.
"""

import itertools
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Protocol, assert_never

from engine.shared.messages import (
    AddRequest,
    EngineInput,
    FrontEndNotice,
    RequestOutput,
    UtilityResult,
    UtilityValue,
)
from server.router.events import (
    Action,
    CallResult,
    Count,
    Deliver,
    Event,
    Fail,
    Notify,
    Send,
    SendIfReachable,
    SendsFailed,
    Woken,
)
from server.router.generation_client import KillsEngines, NoEngineAvailable
from server.router.request import RoutedRequest
from server.router.router import Router
from server.router.token_stream import RequestStream, UnreadOutputs

logger = logging.getLogger(__name__)


class ClientMetrics(Protocol):
    """Metrics of requests and engines."""

    def count(self, name: str, *labels: str | int, by: float = 1) -> None: ...

    def observe(self, name: str, seconds: float) -> None: ...


@dataclass(eq=False)
class RouterShell:
    """Passes events to a router and performs its actions."""

    router: Router
    _: KW_ONLY
    send: Callable[[bytes, EngineInput], bool]
    """Sends a message to a peer; False if there is no such peer now."""
    notify: Callable[[FrontEndNotice], None]
    """Sends a notice to the coordinator."""
    on_idle: Callable[[], None]
    """Called after an event that left no request in flight."""
    metrics: ClientMetrics
    clock: Callable[[], float]
    """Returns monotonic seconds."""

    def __post_init__(self) -> None:
        self._streams: dict[RoutedRequest, RequestStream] = {}
        self._on_answers: dict[int, Callable[[list[UtilityResult]], None]] = {}
        self._call_ids = itertools.count(1)

    # -- requests and calls ----------------------------------------------------------------------

    def submit(
        self,
        message: AddRequest,
        pinned_rank: int | None = None,
        unread: UnreadOutputs | None = None,
    ) -> RequestStream:
        """Route one sequence to an engine and return its stream.

        Raises:
            NoEngineAvailable: no engine, or not the pinned one, is available.
        """
        stream = RequestStream(message, self._close, pinned_rank, unread)
        actions = self.router.submit(stream.request, self.clock())
        self._streams[stream.request] = stream
        self._perform(actions)
        return stream

    def _close(self, stream: RequestStream) -> None:
        if self._streams.pop(stream.request, None) is not None:
            self._perform(self.router.close(stream.request, self.clock()))

    def call(
        self,
        rank: int | None,
        name: str,
        arguments: dict[str, UtilityValue],
        on_answers: Callable[[list[UtilityResult]], None],
    ) -> int:
        """Call a utility of one engine, or of all with rank None; return the call's id.

        `on_answers` is called once, at the latest with `call_overdue`.

        Raises:
            NoEngineAvailable: there is no such engine now.
        """
        call_id = next(self._call_ids)
        routes = self.router.members.routes.values()
        actions = self.router.calls.begin(call_id, rank, name, arguments, routes)
        self._on_answers[call_id] = on_answers
        self._perform(actions)
        return call_id

    def call_overdue(self, call_id: int, why: str) -> None:
        """End a call, if it has not ended yet, with errors for the missing answers."""
        self._perform(self.router.calls.overdue(call_id, why))

    # -- events ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Have the router handle an event, and perform its actions."""
        self._perform(self.router.handle(event, self.clock()))

    def query_blocks(self) -> None:
        """Ask engines for changes of their KV blocks."""
        self._perform(self.router.block_queries(self.clock()))

    def _perform(self, actions: list[Action]) -> None:
        while actions:
            failed: list[Send] = []
            for action in actions:
                match action:
                    case Deliver(outputs):
                        self._deliver(outputs)
                    case Send():
                        self._send_request(action, failed)
                    case SendIfReachable(to, message):
                        self.send(to, message)
                    case Fail(request, error):
                        self._fail(request, error)
                    case CallResult(call_id, results):
                        self._on_answers.pop(call_id)(results)
                    case Notify(notice):
                        self.notify(notice)
                    case Count(name, by):
                        self.metrics.count(name, by=by)
                    case Woken(seconds):
                        self.metrics.observe("wake_latency_seconds", seconds)
                    case _:
                        assert_never(action)
            actions = self.router.handle(SendsFailed(failed), self.clock()) if failed else []
        if not self.router.delivery.in_flight:
            self.on_idle()

    def _deliver(self, outputs: list[tuple[RoutedRequest, RequestOutput]]) -> None:
        streams = self._streams
        for request, output in outputs:
            if output.finish_reason is None:
                stream = streams.get(request)
            else:
                stream = streams.pop(request, None)
            if stream is not None:
                stream.put(output)

    def fail_all(self, error: NoEngineAvailable) -> None:
        """End all requests with an error."""
        for request in list(self._streams):
            self._fail(request, error)
            self._perform(self.router.close(request, self.clock()))

    def _fail(self, request: RoutedRequest, error: NoEngineAvailable | KillsEngines) -> None:
        if (stream := self._streams.pop(request, None)) is not None:
            stream.fail(error)

    def _send_request(self, send: Send, failed: list[Send]) -> None:
        if not self.send(send.to, send.message):
            failed.append(send)
        elif isinstance(send.message, AddRequest):
            self.metrics.count("routing_decisions", send.rank, send.reason)
            if logger.isEnabledFor(logging.DEBUG):
                name = send.message.request_id
                fields = {"request_id": name, "engine": send.rank, "reason": send.reason}
                logger.debug("request %s goes to engine %d", name, send.rank, extra=fields)
