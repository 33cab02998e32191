"""The body of an engine's loop: events in, steps, outputs out. No sockets or threads."""

import logging
import time
from collections.abc import Callable

from engine.batch.executor import Executor, GroupExecutor
from engine.core.adapter_manager import AdapterManager
from engine.core.events import (
    AdaptersSettled,
    CoreEvent,
    FrontEndJoined,
    FrontEndLeft,
    PrerequisitesSettled,
    Rejoined,
)
from engine.core.extensions import Extensions, Worker
from engine.core.front_ends import CoreStep, FrontEnds, UrgentStats
from engine.core.halting import FLEET, Halting
from engine.core.operations import Operations
from engine.core.steps import Steps
from engine.core.utilities import execute_operation
from engine.core.wave_clock import WaveClock
from engine.kv.events import KvEventLog
from engine.kv.tiers import KvTiers
from engine.scheduler.admission import AdmissionPolicy
from engine.scheduler.scheduler import Scheduler
from engine.shared.config import EngineConfig
from engine.shared.image_window import IMAGE_WINDOW_BYTES
from engine.shared.messages import (
    AbortRequests,
    AdapterLoad,
    AdapterLoadResult,
    AdapterTable,
    AddRequest,
    ApplyAdapterTable,
    EngineSetup,
    EngineStats,
    ExpertLoad,
    FleetOrder,
    KvBlocks,
    KvBlocksQuery,
    KvRole,
    RequestOutput,
    StartDpWave,
    UtilityCall,
    WeightsSource,
)

logger = logging.getLogger(__name__)


class EngineCore:
    """One engine: handles events, runs steps, and returns messages to send."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        rank: int,
        incarnation: int,
        admission: AdmissionPolicy | None = None,
        tiers: KvTiers | None = None,
        kv_events: KvEventLog | None = None,
        clock: WaveClock | None = None,
        now: Callable[[], float] = time.monotonic,
        on_adapters: Callable[[AdapterTable, list[AdapterLoadResult]], None] = lambda *_: None,
        on_setup: Callable[[EngineSetup], None] = lambda _: None,
        weight_version: str = "",
        kv_role: KvRole = "",
        kv_address: str = "",
    ) -> None:
        """Connect the components.

        Args:
            kv_role: role if prompts and answers are computed by different engines.
            kv_address: address that serves its KV blocks.
            on_adapters: called with the states of the engine's adapters.
            on_setup: called with the new setup after its weights have been replaced.
            weight_version: version name of the configured weights.
        """
        self.clock = clock or WaveClock()
        self._kv_events = kv_events
        self._rank, self._incarnation = rank, incarnation
        self._now = now
        self._version = 0
        """Version of the newest stats."""
        self._scheduler = Scheduler(
            config.scheduler,
            config.cache,
            executor.info,
            executor.grammars,
            max_loras=0 if executor.adapters is None else config.lora.max_loras,
            tiers=tiers,
            events=kv_events,
        )
        self.adapters = AdapterManager(
            config.lora,
            executor.adapters,
            self._scheduler.adapters,
            self._scheduler.uses_adapter,
            on_adapters,
        )
        self._front_ends = FrontEnds()
        self.halting = Halting()
        self.steps = Steps(
            rank,
            config.scheduler,
            self._scheduler,
            executor,
            self._front_ends,
            admission=admission,
            now=now,
        )
        self._experts = executor.expert_balance if isinstance(executor, GroupExecutor) else None
        info, cache = executor.info, config.cache
        finds_prefixes = cache.enable_prefix_caching and not info.in_one_step
        self.setup = EngineSetup(
            info.num_kv_blocks if info.has_kv else 0,
            cache.block_size,
            self._scheduler.max_model_len,
            info.model_fingerprint,
            config.scheduler.max_num_seqs,
            finds_prefixes,
            cache.gpu_memory_utilization,
            cache.num_kv_blocks,
            cache.kv_cache_memory_bytes,
            len(info.cache_windows),
            cache.kv_cache_dtype,
            info.is_batch_invariant,
            images=info.vision is not None,
            reports_blocks=info.has_kv and finds_prefixes,
            image_window=0 if info.vision is None else IMAGE_WINDOW_BYTES,
            kv_role=kv_role,
            kv_address=kv_address,
        )
        """Reported to the coordinator when the engine is ready."""
        self.operations = Operations(
            setup=self.setup,
            halting=self.halting,
            stats=self.stats,
            steps=self.steps,
            scheduler=self._scheduler,
            executor=executor,
            adapters=self.adapters,
            front_ends=self._front_ends,
            weights=WeightsSource(config.model.model, config.model.revision, weight_version),
            weights_dir=config.model.weights_dir,
            has_workers=config.parallel.processes > 1 or config.parallel.enable_expert_parallel,
            on_setup=on_setup,
            profiler_dir=config.executor.torch_profiler_dir,
            name=f"{rank}-{incarnation:x}",
            extensions=Extensions(
                config.executor.worker_extensions, Worker(rank, incarnation, executor)
            ),
        )

    # -- queries ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to send."""
        if self.steps.in_flight or self._front_ends.has_messages:
            return True
        return self._scheduler.needs_plan and not self.halting.is_halted

    @property
    def has_requests(self) -> bool:
        """See `HostedEngine`; for a halted engine only steps in flight count."""
        if any(each.plan.slots for each in self.steps.in_flight) or self._front_ends.has_messages:
            return True
        return self._scheduler.has_requests and not self.halting.is_halted

    @property
    def needs_steps(self) -> bool:
        """Whether the group has to launch steps for this engine, besides those in flight.

        True if there are requests to compute, or steps that a previous group abandoned.
        """
        return self._scheduler.needs_plan or self.steps.any_abandoned

    @property
    def has_front_ends(self) -> bool:
        """Whether any connected front end could send requests."""
        return self._front_ends.any_present

    @property
    def next_tokens(self) -> int:
        """Maximum tokens that the next step can compute."""
        return self._scheduler.next_tokens

    def stats(self) -> EngineStats:
        """Return current load and counters, with a version above all earlier ones."""
        self._version += 1
        clock, scheduler, halting = self.clock, self._scheduler, self.halting
        waiting, running, kv_usage, queued_prefill_tokens = scheduler.gauges()
        experts = self._experts
        return EngineStats(
            self._rank,
            self._incarnation,
            self._version,
            clock.wave,
            self.steps.count,
            waiting,
            running,
            kv_usage,
            queued_prefill_tokens,
            self._front_ends.received(),
            scheduler.counters.snapshot(),
            clock.topology,
            clock.running,
            clock.hold_epoch,
            self._urgent_stats.halted,
            scheduler.num_deferred,
            scheduler.exclusive_request,
            halting.hands_over,
            self._adapter_load(),
            halting.sleep_level,
            None if experts is None else ExpertLoad(experts.imbalance or 0.0, experts.moved_layers),
            self.operations.weights.version,
        )

    def _adapter_load(self) -> AdapterLoad | None:
        if self.operations.executor.adapters is None:
            return None
        slots = self._scheduler.adapters
        return AdapterLoad(slots.residents, slots.running, self._scheduler.waiting_adapters)

    @property
    def _urgent_stats(self) -> UrgentStats:
        """Stats that all front ends have to be sent immediately when they change."""
        is_halted = self.halting.is_halted or not self._scheduler.admits
        return UrgentStats(is_halted, self.halting.hands_over, self._scheduler.exclusive_request)

    # -- events ----------------------------------------------------------------------------------

    def handle(self, event: CoreEvent) -> None:
        """Handle one event, as specified by `HostedEngine`."""
        match event:
            case AddRequest():
                self.clock.request_received(event.wave)
                self._add(event)
            case AbortRequests():
                self._scheduler.abort(event.ids)
            case UtilityCall(_, front_end, name) if front_end != FLEET and not self._is_present(
                front_end, name
            ):
                pass
            case UtilityCall() | FleetOrder():
                self._front_ends.results += execute_operation(self.operations, event, self._rank)
            case KvBlocksQuery(front_end, after) if self._front_ends.is_present(front_end):
                self._front_ends.block_requests[front_end] = after
                self._answer_block_requests()
            case FrontEndJoined(index, incarnation):
                self.front_end_joined(index, incarnation)
            case FrontEndLeft(index):
                self.front_end_left(index)
            case PrerequisitesSettled():
                self._front_ends.collect(self._scheduler.queue_compiled())
            case ApplyAdapterTable():
                self.adapters.take(event.table)
            case AdaptersSettled():
                self.adapters.settled()
            case StartDpWave():
                self.clock.start_ordered(event)
            case Rejoined(wave):
                self.clock.welcomed(wave)

    def front_end_joined(self, index: int, incarnation: int) -> None:
        """Record a front end that has joined; a new incarnation replaces its predecessor."""
        if self._front_ends.joined(index, incarnation):
            self._scheduler.abort_front_end(index)

    def front_end_left(self, index: int) -> None:
        """Record that a front end has left: its requests are aborted."""
        if self._front_ends.left(index):
            self._scheduler.abort_front_end(index)

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> CoreStep:
        """Advance by a step (see `Steps.advance`) and return everything to send."""
        self.steps.advance(may_launch=not self.halting.is_halted)
        return self._take_messages()

    def land_together(self) -> CoreStep:
        """Run `Steps.land_together`, and return everything to send."""
        self.steps.land_together()
        return self._take_messages()

    def answers(self) -> CoreStep | None:
        """Return messages that can be sent without a step; None if there are none."""
        has_urgent = self._front_ends.reported != self._urgent_stats
        return self._take_messages() if self._front_ends.has_messages or has_urgent else None

    def _take_messages(self) -> CoreStep:
        if self.adapters.keeps_unlisted:
            self.adapters.sweep()
        if self._kv_events is not None:
            self._kv_events.flush()
        self._answer_block_requests()
        urgent = self._urgent_stats
        exclusive_changes = urgent.exclusive_request != self._front_ends.reported.exclusive_request
        return self._front_ends.hand_over(urgent, self.stats, exclusive_changes=exclusive_changes)

    def _answer_block_requests(self) -> None:
        waiting = self._front_ends.block_requests
        for front_end, after in list(waiting.items()):
            changes = self._scheduler.blocks_since(after)
            if changes is not None:
                del waiting[front_end]
                blocks = KvBlocks(self._rank, self._incarnation, *changes)
                self._front_ends.blocks.append((front_end, blocks))

    def _add(self, message: AddRequest) -> None:
        if not self._is_present(message.front_end, message.request_id):
            return
        name = message.request_id
        restored = self._front_ends.restored(message)
        if restored is None:
            logger.warning("request %s: its images were lost", name, extra={"request_id": name})
            return
        self._front_ends.count_request(restored)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s arrived", name, extra={"request_id": name})
        try:
            answer = self._scheduler.add(restored, self._now())
        except Exception as error:  # nothing of it was queued: only this request fails
            logger.exception("request %s could not be queued", name, extra={"request_id": name})
            answer = RequestOutput(message.id, [], "error", error=f"{type(error).__name__}")
        if answer is not None:
            self._front_ends.address(message.front_end).append(answer)

    def _is_present(self, index: int, what: str) -> bool:
        """Return whether the sender is connected to receive an answer; log the drop if not."""
        present = self._front_ends.is_present(index)
        if not present:
            logger.warning("%s dropped: front end %d is not connected", what, index)
        return present
