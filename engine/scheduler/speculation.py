"""Which draft tokens are proposed for which request, and how many are accepted."""

from dataclasses import dataclass

from engine.scheduler.admission import StepBudget
from engine.scheduler.batch import SlotBlocks
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.ngram import NgramIndex
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.request import Request
from engine.scheduler.turns import Turns
from engine.shared.config import SchedulerConfig
from engine.shared.messages import EngineCounters

DEFAULT_LOOKUP_MIN = 2
DEFAULT_LOOKUP_MAX = 4


@dataclass(slots=True)
class _Drafts:
    """What is known about one running request."""

    index: NgramIndex
    length: int
    """Tokens to propose next: as many as asked for while all are accepted, fewer while none is."""


class Speculator:
    """Proposes tokens that a step computes beside the newest one of a request.

    Each is kept if the draw at its position gives the same token, so that output never depends on
    what is proposed; only the number of steps does.
    """

    def __init__(self, scheduling: SchedulerConfig, counters: EngineCounters) -> None:
        self._max = scheduling.speculative_ngram
        self._shortest, self._longest = lookup_lengths(scheduling)
        self._counters = counters
        self._drafts: dict[int, _Drafts] = {}

    def propose(
        self,
        plan: PlanBuilder,
        budget: StepBudget,
        kv: KVCacheManager,
        turns: Turns,
        *,
        headroom: int,
    ) -> None:
        """Let decodes verify drafts with the tokens and blocks that nobody else wants now.

        Args:
            plan: a step that is complete but for drafts.
            budget: what is left of its tokens.
            kv: gives blocks for drafts.
            turns: says what others leave to the request.
            headroom: blocks that must stay free.
        """
        for request in plan.decodes:
            if request.num_pending_tokens > 1:
                continue  # its newest token is not known
            table, start = request.table, request.num_computed_tokens
            room = request.max_total_tokens - start - 1
            proposed = self._propose(request, min(room, budget.num_tokens))
            if start + len(proposed) > table.capacity and not plan.short_of_blocks:
                first = len(table.block_ids)
                new = kv.try_grow(table, start + len(proposed), headroom=headroom)
                if new is not None:
                    plan.blocks.append(SlotBlocks(request.slot, first, new))
            proposed = proposed[: table.capacity - start]
            if proposed:
                proposed = proposed[: turns.drafts(request, len(proposed))]
            if proposed:
                budget.speculate(len(proposed))
                plan.propose(request, proposed)

    def _propose(self, request: Request, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the request's known ones.

        None come after a token that would end the request.
        """
        drafts = self._drafts.get(request.id)
        if drafts is None:
            drafts = _Drafts(NgramIndex(self._shortest, self._longest), self._max)
            self._drafts[request.id] = drafts
        count = min(most, drafts.length)
        if count < 1:
            return []
        proposed = drafts.index.propose(request.token_ids, count)
        for position, token_id in enumerate(proposed):
            if token_id in request.stop_ids:
                return proposed[: position + 1]
        return proposed

    def verified(self, request: Request, proposed: int, accepted: int) -> None:
        """This many of the tokens proposed last were accepted."""
        counters = self._counters
        counters.spec_drafts += 1
        counters.spec_draft_tokens += proposed
        counters.count_accepted(accepted)
        drafts = self._drafts.get(request.id)
        if drafts is None:
            return
        if accepted == proposed:
            drafts.length = min(self._max, 2 * drafts.length)
        elif accepted == 0:
            drafts.length = max(1, drafts.length // 2)

    def forget(self, request: Request) -> None:
        """The request does not run any more."""
        self._drafts.pop(request.id, None)

    @property
    def num_tracked(self) -> int:
        """Number of requests with drafts that are remembered."""
        return len(self._drafts)


def lookup_lengths(scheduling: SchedulerConfig) -> tuple[int, int]:
    """Return the minimum and maximum tokens to compare; each bounds the other's default."""
    shortest, longest = scheduling.prompt_lookup_min, scheduling.prompt_lookup_max
    if shortest is None:
        shortest = min(DEFAULT_LOOKUP_MIN, longest or DEFAULT_LOOKUP_MIN)
    return shortest, longest or max(DEFAULT_LOOKUP_MAX, shortest)
