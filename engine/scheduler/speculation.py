"""Which draft tokens are proposed for which request, and how many are accepted."""

import sys
from array import array
from collections.abc import Sequence

from engine.batch.batch import TO_BE_DRAFTED
from engine.batch.executor import ExecutorInfo
from engine.scheduler.admission import StepBudget
from engine.scheduler.draft_lengths import DraftLengths, Offer, Prices
from engine.scheduler.fairness import Fairness
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.request import Request, RequestStatus
from engine.shared.config import SchedulerConfig
from engine.shared.messages import EngineCounters

_MAX_CANDIDATES = 8
"""Maximum earlier occurrences that are compared, newest first."""


class NgramIndex:
    """Finds where the last tokens of one sequence occurred before; grows with the sequence.

    Occurrences of the same `shortest` tokens form a chain, newest first, as in the hash chains of
    LZ77 compressors (RFC 1951, section 4), so that a token costs one look-up to add.
    """

    __slots__ = ("_earlier", "_longest", "_newest", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        """Look for matches of at least `shortest` tokens; more than `longest` are not compared."""
        self._shortest = shortest
        self._longest = longest
        self._newest: dict[tuple[int, ...], int] = {}
        """Position after the newest occurrence of so many tokens."""
        self._earlier = array("q")
        """For each position from `shortest` on the one before it in its chain, or -1."""

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that may follow, or none where the last ones are new.

        Of the earlier occurrences the one that agrees furthest back is continued, and of those
        the newest. A continuation that reaches the end of the sequence goes on with itself. From
        call to call the sequence only grows.
        """
        self._extend(token_ids)
        end = len(token_ids)
        if end < self._shortest:
            return []
        best, best_length = -1, 0
        position = self._newest.get(tuple(token_ids[end - self._shortest :]), -1)
        for _ in range(_MAX_CANDIDATES):
            if position < 0 or best_length == self._longest:
                break
            length = self._agreement(token_ids, position)
            if length > best_length:
                best, best_length = position, length
            position = self._earlier[position - self._shortest]
        if best < 0:
            return []
        period = end - best
        return [token_ids[best + offset % period] for offset in range(count)]

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Enter every position whose token has become known."""
        size, newest, earlier = self._shortest, self._newest, self._earlier
        for position in range(len(earlier) + size, len(token_ids)):
            key = tuple(token_ids[position - size : position])
            earlier.append(newest.get(key, -1))
            newest[key] = position

    def _agreement(self, token_ids: Sequence[int], position: int) -> int:
        """Return how many tokens before `position` are those at the end of the sequence."""
        length, end = self._shortest, len(token_ids)
        longest = min(self._longest, position)
        while length < longest and token_ids[position - length - 1] == token_ids[end - length - 1]:
            length += 1
        return length


DEFAULT_LOOKUP_MIN = 2
DEFAULT_LOOKUP_MAX = 4


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
        self._drafts_later = scheduling.drafts_with_model
        """Whether a draft model or head beside the executor drafts when the step is computed; there
        it finds the request's blocks and its newest token."""
        self._lookup = lookup_lengths(scheduling)
        self._ngrams: dict[int, NgramIndex] = {}
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

        The plan is complete but for drafts; `headroom` is how many blocks have to stay free.
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
                budget.num_tokens -= len(proposed)
                request.num_proposed_tokens = len(proposed)
                plan.proposed[request.id] = proposed

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
        """Return at most `most` tokens that may follow the request's known ones, up to an end."""
        room = request.max_total_tokens - request.num_computed_tokens - 1
        count = min(most, room, self._max)
        if count <= 0:
            return []
        if self._drafts_later:
            return [TO_BE_DRAFTED] * count
        index = self._ngrams.get(request.id)
        if index is None:
            index = self._ngrams[request.id] = NgramIndex(*self._lookup)
        proposed = index.propose(request.token_ids, count)
        for length, token_id in enumerate(proposed, 1):
            if token_id in request.stop_ids:
                return proposed[:length]
        return proposed

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
        self._ngrams.pop(request.id, None)

    @property
    def num_tracked(self) -> int:
        """Requests with drafts that are remembered."""
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
