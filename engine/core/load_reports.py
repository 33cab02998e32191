"""What an engine tells of itself: once what it is, then what it has to do and has done."""

from engine.core.receive_counts import News
from engine.core.wave_clock import WaveClock
from engine.executor.interface import ExecutorInfo
from engine.scheduler.accounts import Counters, Gauges
from engine.shared.config import CacheConfig
from engine.shared.messages import EngineSetup, EngineStats, Received


def engine_setup(
    info: ExecutorInfo, cache: CacheConfig, *, max_model_len: int, max_num_seqs: int
) -> EngineSetup:
    """Return what the coordinator is told when an engine is ready."""
    return EngineSetup(
        info.num_kv_blocks,
        cache.block_size,
        max_model_len,
        info.model_fingerprint,
        max_num_seqs,
        cache.enable_prefix_caching,
        cache.gpu_memory_utilization,
        cache.num_kv_blocks,
        cache.kv_cache_memory_bytes,
    )


def engine_stats(
    rank: int,
    incarnation: int,
    version: int,
    clock: WaveClock,
    *,
    gauges: Gauges,
    counters: Counters,
    received: list[Received],
    step: int,
    dummy_steps: int,
    deferred: int,
    news: News,
) -> EngineStats:
    """Return load and counters as of now."""
    return EngineStats(
        rank=rank,
        incarnation=incarnation,
        version=version,
        wave=clock.wave,
        step=step,
        waiting=gauges.waiting,
        running=gauges.running,
        kv_usage=gauges.kv_usage,
        queued_prefill_tokens=gauges.queued_prefill_tokens,
        received=received,
        prefix_cache_queries_total=counters.prefix_cache_queries,
        prefix_cache_hits_total=counters.prefix_cache_hits,
        preemptions_total=counters.preemptions,
        prompt_tokens_total=counters.prompt_tokens,
        generation_tokens_total=counters.generation_tokens,
        dummy_steps_total=dummy_steps,
        topology=clock.topology,
        wave_running=clock.running,
        hold_epoch=clock.hold_epoch,
        spec_drafts_total=counters.spec_drafts,
        spec_draft_tokens_total=counters.spec_draft_tokens,
        spec_accepted_tokens_total=counters.spec_accepted_tokens,
        grammar_requests_total=counters.grammar_requests,
        grammar_waits_total=counters.grammar_waits,
        halted=news.halted,
        step_tokens_buckets=counters.step_tokens_buckets.copy(),
        step_tokens_total=counters.step_tokens,
        deferred=deferred,
        alone=news.alone,
        hands_over=news.hands_over,
    )
