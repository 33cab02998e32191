"""Which draft tokens are proposed for which request, and how many are accepted."""

import sys
from typing import Protocol

from engine.batch.batch import TO_BE_DRAFTED
from engine.batch.executor import ExecutorInfo
from engine.scheduler.admission import StepBudget
from engine.scheduler.draft_lengths import DraftLengths, Offer, Prices
from engine.scheduler.fairness import Fairness
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.ngram import NgramIndex
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.request import Request, RequestStatus
from engine.shared.config import SchedulerConfig
from engine.shared.messages import EngineCounters

DEFAULT_LOOKUP_MIN = 2
DEFAULT_LOOKUP_MAX = 4


class Proposer(Protocol):
    """Where draft tokens come from."""

    def propose(self, request: Request, count: int) -> list[int]:
        """Return at most `count` tokens, 1 or more, that may follow the request's known ones."""
        ...

    def forget(self, request: Request) -> None:
        """The request does not run any more."""
        ...


class NgramProposer:
    """Proposes what followed the request's last tokens where they occurred before."""

    def __init__(self, shortest: int, longest: int) -> None:
        """Compare at least `shortest` and at most `longest` tokens."""
        self._lengths = shortest, longest
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, request: Request, count: int) -> list[int]:
        """Return at most `count` tokens, none after one that would end the request."""
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = NgramIndex(*self._lengths)
        proposed = index.propose(request.token_ids, count)
        for position, token_id in enumerate(proposed):
            if token_id in request.stop_ids:
                return proposed[: position + 1]
        return proposed

    def forget(self, request: Request) -> None:
        """Drop what is known of its tokens."""
        self._indexes.pop(request.id, None)


class ModelProposer:
    """Leaves it to a draft model or head beside the executor's, when the step is computed.

    There it finds the request's blocks and its newest token.
    """

    def propose(self, request: Request, count: int) -> list[int]:
        """Return `count` placeholders."""
        return [TO_BE_DRAFTED] * count

    def forget(self, request: Request) -> None:
        """Nothing is remembered here."""


class Speculator:
    """Proposes tokens that a step computes beside the newest one of a request.

    Each is kept if the draw at its position gives the same token, so that output never depends on
    what is proposed; only the number of steps does.
    """

    def __init__(
        self, scheduling: SchedulerConfig, prices: Prices, counters: EngineCounters
    ) -> None:
        """Draft as the settings say, as long as it pays at these prices."""
        self._max = scheduling.max_draft_tokens
        self._max_decodes = scheduling.speculative_disable_by_batch_size or sys.maxsize
        self._proposer: Proposer = ModelProposer()
        if not scheduling.drafts_with_model:
            self._proposer = NgramProposer(*lookup_lengths(scheduling))
        self._counters = counters
        self._lengths = DraftLengths(self._max, prices)

    def propose(
        self,
        plan: PlanBuilder,
        budget: StepBudget,
        kv: KVCacheManager,
        fairness: Fairness,
        *,
        headroom: int,
    ) -> None:
        """Let decodes verify drafts with the tokens and blocks that nobody else wants now.

        Args:
            plan: a step that is complete but for drafts.
            budget: what is left of its tokens.
            kv: gives blocks for drafts.
            fairness: says what others leave to the request.
            headroom: blocks that must stay free.
        """
        for request, proposed in self._chosen(plan, budget.num_tokens):
            table, start = request.table, request.num_computed_tokens
            proposed = proposed[: budget.num_tokens]
            end = start + len(proposed)
            wants_blocks = end > table.capacity and not plan.short_of_blocks
            if wants_blocks and kv.try_grow(table, end, headroom=headroom):
                plan.tell_blocks(request)
            proposed = proposed[: table.capacity - start]
            if proposed:
                proposed = proposed[: fairness.drafts(request, len(proposed))]
            if proposed:
                budget.speculate(len(proposed))
                plan.propose(request, proposed)

    def _chosen(self, plan: PlanBuilder, most: int) -> list[tuple[Request, list[int]]]:
        """Return the requests of a plan that get drafts of at most so many tokens, with these."""
        decodes = len(plan.decodes)
        offers = [
            (request, proposed)
            for request in plan.decodes
            # Of others the newest token is not known.
            if request.num_pending_tokens == 1 and (proposed := self._propose(request, most))
        ]
        if not offers:
            return []
        if decodes > self._max_decodes:
            self._counters.spec_skipped += len(offers)
            return []
        lengths = self._lengths.decide(
            decodes, [Offer(request.id, len(proposed)) for request, proposed in offers]
        )
        self._counters.spec_skipped += lengths.count(0)
        return [
            (request, proposed[:length])
            for (request, proposed), length in zip(offers, lengths, strict=True)
            if length
        ]

    def _propose(self, request: Request, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the request's known ones."""
        room = request.max_total_tokens - request.num_computed_tokens - 1
        count = min(most, room, self._max)
        return self._proposer.propose(request, count) if count > 0 else []

    def verified(self, request: Request, proposed: int, accepted: int) -> None:
        """This many of the tokens proposed last were accepted."""
        counters = self._counters
        counters.spec_drafts += 1
        counters.spec_draft_tokens += proposed
        counters.count_accepted(accepted)
        if request.status is RequestStatus.RUNNING:
            self._lengths.observe(request.id, proposed, accepted)

    def forget(self, request: Request) -> None:
        """The request does not run any more."""
        self._lengths.forget(request.id)
        self._proposer.forget(request)

    @property
    def num_tracked(self) -> int:
        """Number of requests with drafts that are remembered."""
        return self._lengths.num_tracked


def draft_prices(scheduling: SchedulerConfig, executor: ExecutorInfo) -> Prices:
    """Return what drafts cost: nothing, if that is what the settings say of tokens."""
    row = scheduling.speculative_row_price
    if row == 0:
        return Prices(0.0)
    return Prices(executor.row_price if row is None else row, executor.draft_price)


def lookup_lengths(scheduling: SchedulerConfig) -> tuple[int, int]:
    """Return the minimum and maximum tokens to compare; each bounds the other's default."""
    shortest, longest = scheduling.prompt_lookup_min, scheduling.prompt_lookup_max
    if shortest is None:
        shortest = min(DEFAULT_LOOKUP_MIN, longest or DEFAULT_LOOKUP_MIN)
    return shortest, longest or max(DEFAULT_LOOKUP_MAX, shortest)
