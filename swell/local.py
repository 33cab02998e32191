"""An engine in a thread of this process, with the client interface of the endpoints."""

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from engine.core.engine_core import EngineCore
from engine.core.events import (
    AdaptersSettled,
    FrontEndJoined,
    InboxItem,
    PrerequisitesSettled,
    Stop,
)
from engine.core.front_ends import CoreStep
from engine.core.loop import EngineLoop
from engine.core.watchdog import StepWatch
from engine.process.early_stop import EarlyStop
from engine.process.main import build_executor
from engine.shared.config import EngineConfig
from engine.shared.lifeline import Lifeline
from engine.shared.messages import (
    AbortRequests,
    AdapterOutcome,
    AddRequest,
    ClusterView,
    EngineReport,
    FleetRequest,
    UtilityCall,
    UtilityResult,
    UtilityValue,
)
from server.router.adapters import Adapters
from server.router.generation_client import KvOffer, NoEngineAvailable
from server.router.token_stream import RequestStream, UnreadOutputs

_FRONT_END = 0
_INCARNATION = 1


class LocalEngine:
    """A `GenerationClient` whose only engine steps in a background thread."""

    def __init__(self, config: EngineConfig, loop: asyncio.AbstractEventLoop) -> None:
        """Load the model, and start serving tasks of the event loop.

        Raises:
            CannotStart, ValueError, OSError: the engine cannot start with these settings.
        """
        self._executor = build_executor(config, 0, Lifeline(None), EarlyStop())
        self._core = EngineCore(config, self._executor, rank=0, incarnation=_INCARNATION)
        self._inbox: SimpleQueue[InboxItem] = SimpleQueue()
        if self._executor.grammars is not None:
            self._executor.grammars.on_settled = lambda: self._inbox.put(PrerequisitesSettled())
        if self._executor.adapters is not None:
            self._executor.adapters.on_settled = lambda: self._inbox.put(AdaptersSettled())
        self._inbox.put(FrontEndJoined(_FRONT_END, _INCARNATION))
        self._loop = loop
        self._streams: dict[int, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._next_id = 0
        self._error = ""
        """Why the engine has ended; empty while it runs."""
        self.adapters = Adapters(_FRONT_END, _INCARNATION)
        self._step_loop = EngineLoop(
            self._core,
            self._inbox,
            self,
            StepWatch(config.executor.step_timeout),
            drain_timeout=config.cluster.drain_timeout,
            on_iteration=lambda: None,
            on_drain=lambda: None,
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._step_loop.run()
            reason = "The engine was closed."
        except Exception as error:
            reason = f"The engine failed: {type(error).__name__}: {error}"
        finally:
            self._executor.shutdown()
        self._call_on_loop(lambda: self._ended(reason))

    def _call_on_loop(self, function: Callable[[], None]) -> None:
        """Run a function on the event loop, unless the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def close(self) -> None:
        """Stop the engine, aborting all requests, and free the model."""
        self._inbox.put(Stop())
        self._thread.join()

    # -- Outlet: called from the engine's thread -------------------------------------------------

    def send_step(self, step: CoreStep) -> None:
        """Pass the outputs of a step to the event loop."""
        if step.outputs or step.utility_results:
            self._call_on_loop(lambda: self._deliver(step))

    def report(self, report: EngineReport) -> None:
        """Do nothing: there is no coordinator."""

    # -- callbacks on the event loop -------------------------------------------------------------

    def _deliver(self, step: CoreStep) -> None:
        now = time.monotonic()
        for output in step.outputs.get(_FRONT_END, ()):
            stream = self._streams.get(output.id)
            if stream is None:
                continue
            last = output.finish_reason is not None
            if output.timing is not None:
                stream.times.record_timing(output.timing, now, last=last)
            if last:
                del self._streams[output.id]
            stream.put(output)
        for _, result in step.utility_results:
            answer = self._calls.pop(result.call_id, None)
            if answer is not None and not answer.done():
                answer.set_result(result)

    def _ended(self, reason: str) -> None:
        self._error = reason
        for stream in self._streams.values():
            stream.fail(NoEngineAvailable(reason))
        self._streams.clear()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(NoEngineAvailable(reason))
        self._calls.clear()

    def _close(self, stream: RequestStream) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self._inbox.put(AbortRequests([stream.id]))

    # -- GenerationClient ------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return not self._error

    @property
    def reaches_engines(self) -> bool:
        return True

    async def wait_for_engines(self) -> None:
        pass

    def check_accepts_requests(self) -> None:
        if self._error:
            raise NoEngineAvailable(self._error)

    @property
    def max_model_len(self) -> int:
        return self._core.setup.max_model_len

    @property
    def serves_images(self) -> bool:
        return self._core.setup.images

    @property
    def needs_original_images(self) -> bool:
        return self._core.setup.whole_images

    @property
    def num_slots(self) -> int:
        return self._core.setup.max_num_seqs

    @property
    def view(self) -> ClusterView | None:
        return None

    @property
    def view_age(self) -> float | None:
        return None

    def weight_version(self, rank: int) -> str:
        return self._core.operations.weights.version

    @property
    def kv_offers(self) -> dict[int, KvOffer]:
        return {}

    @property
    def stats_age(self) -> dict[int, float]:
        return {}

    async def change_adapter(
        self, name: str, path: str | None = None, in_place: bool = False
    ) -> AdapterOutcome:
        return AdapterOutcome(0, 400, "Adapters are served by `swell serve` only.")

    async def call_utility(
        self,
        rank: int | None,
        name: str,
        arguments: dict[str, UtilityValue],
        within: float = 120.0,
    ) -> list[UtilityResult]:
        self.check_accepts_requests()
        self._next_id += 1
        answer: asyncio.Future[UtilityResult] = self._loop.create_future()
        self._calls[self._next_id] = answer
        self._inbox.put(UtilityCall(self._next_id, _FRONT_END, name, arguments))
        return [await answer]

    async def order_fleet(self, request: FleetRequest) -> list[UtilityResult]:
        raise NoEngineAvailable("There is no fleet: call the utilities of the engine.")

    def submit(
        self,
        message: AddRequest,
        pinned_rank: int | None = None,
        unread: UnreadOutputs | None = None,
    ) -> RequestStream:
        self.check_accepts_requests()
        self._next_id += 1
        message = msgspec.structs.replace(message, id=self._next_id, front_end=_FRONT_END)
        stream = RequestStream(message, self._close, pinned_rank, unread)
        stream.times.sent(0, time.monotonic())
        self._streams[message.id] = stream
        self._inbox.put(message)
        return stream
