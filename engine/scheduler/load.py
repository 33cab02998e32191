"""How much an engine has to do, and what its next step has room for."""

from engine.scheduler.accounts import Gauges
from engine.scheduler.adapter_slots import AdapterSlots
from engine.scheduler.admission import RankState
from engine.scheduler.books import RequestBooks
from engine.scheduler.fairness import PrefillParts, Shares
from engine.scheduler.isolation import Isolation
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.planner import StepLimits
from engine.scheduler.slots import Slots


class Load:
    """Describes the load to front ends and admission policies."""

    def __init__(
        self,
        books: RequestBooks,
        isolation: Isolation,
        kv: KVCacheManager,
        slots: Slots,
        shares: Shares,
        adapters: AdapterSlots,
        limits: StepLimits,
        *,
        has_kv: bool = True,
    ) -> None:
        """`has_kv`: whether blocks hold keys and values."""
        self._has_kv = has_kv
        self._books = books
        self._isolation = isolation
        self._kv = kv
        self._slots = slots
        self._shares = shares
        self._adapters = adapters
        self._limits = limits

    def gauges(self) -> Gauges:
        """Return the load right now."""
        books = self._books
        usage = self._kv.usage if self._has_kv else 0.0
        return Gauges(books.num_waiting, len(books.running), usage, books.queued_tokens)

    def rank_state(
        self, passed_over: int, last_step_us: int, last_prefill_tokens: int
    ) -> RankState:
        """Return what an admission policy is told about this rank.

        Sequences that have to take turns are counted as if they had not: whose turn it is turns
        out when the step is planned.

        Args:
            passed_over: waiting requests that the newest plan did not admit.
            last_step_us: duration of the newest step that is over, for policies that weigh costs.
            last_prefill_tokens: prefill tokens of that step.
        """
        cap = self._limits.prefill
        parts = self._shares.parts()
        running = self._isolation.planned(self._books.running.values())
        partials = [
            parts.take(r.tenant, min(r.queued_tokens, cap)) for r in running if r.queued_tokens
        ]
        decodes = len(running) - len(partials)
        ready_tokens, ready_requests = self._ready_prefill(partials, decodes, parts)
        return RankState(
            running=len(self._books.running),
            waiting=len(self._books.waiting),
            queued_prefill_tokens=self._books.queued_tokens,
            free_kv_blocks=self._kv.num_free_blocks,
            decodes=decodes,
            ready_prefill_tokens=ready_tokens,
            ready_prefills=ready_requests,
            passed_over=passed_over,
            last_step_us=last_step_us,
            last_prefill_tokens=last_prefill_tokens,
        )

    def _ready_prefill(
        self, partials: list[int], decodes: int, parts: PrefillParts
    ) -> tuple[int, int]:
        """Return how many prefill tokens, of how many requests, the next step has room for."""
        room = max(0, self._limits.tokens - decodes)
        tokens, requests = sum(partials), len(partials)
        slots = self._slots.num_free
        blocks = self._kv.num_free_blocks - (self._limits.headroom if self._books.running else 0)
        for request in self._isolation.admissible(self._books.waiting, self._books.compiling):
            if not self._adapters.admits(request.adapter):
                continue
            if tokens >= room or slots == 0 or request.num_steps_in_flight:
                break
            cached, needed = self._kv.needs(
                request.table, request.token_ids, use_cache=not request.lacks_prompt_logprobs
            )
            if needed > blocks:
                break
            slots -= 1
            blocks -= needed
            wanted = min(request.queued_tokens - cached, self._limits.prefill)
            tokens += parts.take(request.tenant, wanted)
            requests += 1
        return min(tokens, room), requests
