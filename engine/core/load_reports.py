"""What an engine tells of itself: its setup once, then its load and counters."""

from collections.abc import Callable

from engine.batch.executor import ExecutorInfo, ExpertLoads
from engine.core.halting import Halting
from engine.core.held_adapters import HeldAdapters
from engine.core.receive_counts import FrontEndCounts, News
from engine.core.steps import Steps
from engine.core.wave_clock import WaveClock
from engine.scheduler.scheduler import Scheduler
from engine.shared.config import CacheConfig
from engine.shared.messages import EngineSetup, EngineStats, ExpertLoad


def engine_setup(
    info: ExecutorInfo, cache: CacheConfig, *, max_model_len: int, max_num_seqs: int
) -> EngineSetup:
    """Return what the coordinator is told when an engine is ready."""
    return EngineSetup(
        info.num_kv_blocks if info.has_kv else 0,
        cache.block_size,
        max_model_len,
        info.model_fingerprint,
        max_num_seqs,
        cache.enable_prefix_caching and not info.in_one_step,
        cache.gpu_memory_utilization,
        cache.num_kv_blocks,
        cache.kv_cache_memory_bytes,
        len(info.cache_windows),
        cache.kv_cache_dtype,
        info.is_batch_invariant,
        images=info.vision is not None,
    )


class LoadReports:
    """Takes an engine's stats, each newer than all before."""

    def __init__(
        self,
        rank: int,
        incarnation: int,
        clock: WaveClock,
        *,
        scheduler: Scheduler,
        steps: Steps,
        halting: Halting,
        front_ends: FrontEndCounts,
        adapters: HeldAdapters,
        experts: ExpertLoads | None,
        weight_version: Callable[[], str],
    ) -> None:
        self.clock = clock
        self._rank = rank
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._steps = steps
        self._halting = halting
        self._front_ends = front_ends
        self._adapters = adapters
        self._experts = experts
        self._weight_version = weight_version
        self._version = 0

    @property
    def news(self) -> News:
        """What all front ends have to know at once when it changes."""
        halting = self._halting
        return News(self._is_halted, halting.hands_over, self._scheduler.alone)

    def stats(self) -> EngineStats:
        """Return load and counters as of now."""
        self._version += 1
        clock, scheduler, halting = self.clock, self._scheduler, self._halting
        waiting, running, kv_usage, queued_prefill_tokens = scheduler.gauges()
        return EngineStats(
            self._rank,
            self._incarnation,
            self._version,
            clock.wave,
            self._steps.count,
            waiting,
            running,
            kv_usage,
            queued_prefill_tokens,
            self._front_ends.received(),
            scheduler.counters.snapshot(),
            clock.topology,
            clock.running,
            clock.hold_epoch,
            self._is_halted,
            scheduler.num_deferred,
            scheduler.alone,
            halting.hands_over,
            self._adapters.load(),
            halting.sleep_level,
            self._expert_load(),
            self._weight_version(),
        )

    @property
    def _is_halted(self) -> bool:
        return self._halting.is_halted or not self._scheduler.admits

    def _expert_load(self) -> ExpertLoad | None:
        experts = self._experts
        if experts is None:
            return None
        return ExpertLoad(experts.imbalance or 0.0, experts.moved_layers)
