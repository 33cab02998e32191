"""A periodic log line per busy engine."""

import asyncio
import logging
import time
from typing import NamedTuple

from engine.shared.messages import ClusterView, EngineStats
from server.router.generation_client import GenerationClient

logger = logging.getLogger(__name__)


class EngineLine(NamedTuple):
    """Activity of one engine since the last line."""

    engine: int
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    running: int
    waiting: int
    kv_usage: float
    prefix_cache_hit_rate: float
    draft_acceptance_rate: float | None = None
    """Share of draft tokens that were accepted; None if there were none."""

    def __str__(self) -> str:
        drafts = ""
        if self.draft_acceptance_rate is not None:
            drafts = f", draft tokens accepted {100 * self.draft_acceptance_rate:.1f} %"
        return (
            f"engine {self.engine}: {self.prompt_tokens_per_s:.1f} prompt tok/s, "
            f"{self.generated_tokens_per_s:.1f} generated tok/s, {self.running} running, "
            f"{self.waiting} waiting, KV cache {100 * self.kv_usage:.1f} %, "
            f"prefix cache hits {100 * self.prefix_cache_hit_rate:.1f} %{drafts}"
        )


class StatsLog:
    """Converts cumulative counters to rates."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, EngineStats]] = {}

    def lines(self, view: ClusterView | None, now: float) -> list[EngineLine]:
        """Return a line for every engine that has work, or had some since the last call."""
        lines = []
        for entry in [] if view is None else view.engines:
            stats = entry.stats
            if stats is None:
                continue
            since, before = self._before.get(entry.rank, (now, stats))
            self._before[entry.rank] = now, stats
            if before.incarnation != stats.incarnation:
                continue
            seconds = max(1e-9, now - since)
            generated = stats.counters.generation_tokens - before.counters.generation_tokens
            prompt = stats.counters.prompt_tokens - before.counters.prompt_tokens
            queries = stats.counters.prefix_cache_queries - before.counters.prefix_cache_queries
            hits = stats.counters.prefix_cache_hits - before.counters.prefix_cache_hits
            drafted = stats.counters.spec_draft_tokens - before.counters.spec_draft_tokens
            right = stats.counters.spec_accepted_tokens - before.counters.spec_accepted_tokens
            if not (generated or prompt or stats.running or stats.waiting):
                continue
            lines.append(
                EngineLine(
                    engine=entry.rank,
                    prompt_tokens_per_s=prompt / seconds,
                    generated_tokens_per_s=generated / seconds,
                    running=stats.running,
                    waiting=stats.waiting,
                    kv_usage=stats.kv_usage,
                    prefix_cache_hit_rate=hits / max(1, queries),
                    draft_acceptance_rate=right / drafted if drafted else None,
                )
            )
        return sorted(lines)


async def log_stats(client: GenerationClient, interval: float) -> None:
    """Log a line per busy engine every `interval` seconds, until cancelled."""
    log = StatsLog()
    log.lines(client.view, time.monotonic())
    while True:
        await asyncio.sleep(interval)
        for line in log.lines(client.view, time.monotonic()):
            logger.info("%s", line, extra=line._asdict())
