"""Speculative decoding: proposes draft tokens and records how many are accepted."""

import sys
from array import array
from collections.abc import Sequence

from engine.batch.batch import DRAFT_PLACEHOLDER
from engine.batch.executor import ExecutorInfo
from engine.scheduler.admission import StepBudget
from engine.scheduler.draft_lengths import Candidate, DraftLengths, Prices
from engine.scheduler.fairness import Fairness
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.request import Request, RequestStatus
from engine.shared.config import SchedulerConfig
from engine.shared.messages import EngineCounters

_MAX_CANDIDATES = 8
"""Maximum earlier occurrences to compare, newest first."""


class NgramIndex:
    """Finds earlier occurrences of a sequence's last tokens; grows with the sequence.

    Occurrences of the same `shortest` tokens form a chain, newest first, as in the hash chains of
    LZ77 compressors (RFC 1951, section 4), so adding a token costs one look-up.
    """

    __slots__ = ("_earlier", "_longest", "_newest", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        """Match at least `shortest` tokens, and compare at most `longest`."""
        self._shortest = shortest
        self._longest = longest
        self._newest: dict[tuple[int, ...], int] = {}
        """Position after the newest occurrence of each n-gram of `shortest` tokens."""
        self._earlier = array("q")
        """For each position from `shortest` on, the previous one in its chain, or -1."""

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return `count` likely next tokens, or none if the last tokens have not occurred before.

        Continues the earlier occurrence with the longest match; ties go to the newest. A
        continuation that reaches the end of the sequence repeats itself. Between calls the sequence
        must only grow.
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
        """Index every new position."""
        size, newest, earlier = self._shortest, self._newest, self._earlier
        for position in range(len(earlier) + size, len(token_ids)):
            key = tuple(token_ids[position - size : position])
            earlier.append(newest.get(key, -1))
            newest[key] = position

    def _agreement(self, token_ids: Sequence[int], position: int) -> int:
        """Return how many tokens before `position` match the end of the sequence."""
        length, end = self._shortest, len(token_ids)
        longest = min(self._longest, position)
        while length < longest and token_ids[position - length - 1] == token_ids[end - length - 1]:
            length += 1
        return length


DEFAULT_LOOKUP_MIN = 2
DEFAULT_LOOKUP_MAX = 4


class Speculator:
    """Proposes draft tokens for a step to verify after a request's newest token.

    A draft token is accepted if sampling at its position gives the same token, so drafts affect
    only the number of steps, never the output.
    """

    def __init__(
        self, scheduling: SchedulerConfig, prices: Prices, counters: EngineCounters
    ) -> None:
        """Draft according to the settings, while it pays off at these prices."""
        self._max = scheduling.max_draft_tokens
        self._max_decodes = scheduling.speculative_disable_by_batch_size or sys.maxsize
        self._drafts_later = scheduling.drafts_with_model
        """Whether a draft model or head next to the executor drafts at execution time; it has the
        request's blocks and newest token."""
        self._lookup = lookup_lengths(scheduling)
        self._ngrams: dict[int, NgramIndex] = {}
        self._counters = counters
        self.lengths = DraftLengths(self._max, prices)

    def propose(
        self,
        plan: PlanBuilder,
        budget: StepBudget,
        kv: KVCacheManager,
        fairness: Fairness,
        *,
        headroom: int,
    ) -> None:
        """Add drafts to decodes, using tokens and blocks that are otherwise unused.

        The plan is complete except for drafts; `headroom` is the number of blocks to leave free.
        """
        for request, proposed in self._chosen(plan, budget.num_tokens):
            table, start = request.table, request.num_computed_tokens
            proposed = proposed[: budget.num_tokens]
            end = start + len(proposed)
            wants_blocks = end > table.capacity and not plan.short_of_blocks
            if wants_blocks and kv.try_grow(table, end, headroom=headroom):
                plan.add_blocks(request)
            proposed = proposed[: table.capacity - start]
            if proposed:
                proposed = proposed[: fairness.drafts(request, len(proposed))]
            if proposed:
                budget.num_tokens -= len(proposed)
                request.num_proposed_tokens = len(proposed)
                plan.proposed[request.id] = proposed

    def _chosen(self, plan: PlanBuilder, limit: int) -> list[tuple[Request, list[int]]]:
        """Return the requests that get drafts of at most `limit` tokens, with the drafts."""
        decodes = len(plan.decodes)
        candidates = [
            (request, proposed)
            for request in plan.decodes
            # With more pending tokens, the newest token is unknown.
            if request.num_pending_tokens == 1 and (proposed := self._propose(request, limit))
        ]
        if not candidates:
            return []
        if decodes > self._max_decodes:
            self._counters.spec_skipped += len(candidates)
            return []
        lengths = self.lengths.decide(
            decodes, [Candidate(request.id, len(proposed)) for request, proposed in candidates]
        )
        self._counters.spec_skipped += lengths.count(0)
        return [
            (request, proposed[:length])
            for (request, proposed), length in zip(candidates, lengths, strict=True)
            if length
        ]

    def _propose(self, request: Request, limit: int) -> list[int]:
        """Return up to `limit` draft tokens, ending with the first stop token."""
        room = request.max_total_tokens - request.num_computed_tokens - 1
        count = min(limit, room, self._max)
        if count <= 0:
            return []
        if self._drafts_later:
            return [DRAFT_PLACEHOLDER] * count
        index = self._ngrams.get(request.id)
        if index is None:
            index = self._ngrams[request.id] = NgramIndex(*self._lookup)
        proposed = index.propose(request.token_ids, count)
        for length, token_id in enumerate(proposed, 1):
            if token_id in request.stop_ids:
                return proposed[:length]
        return proposed

    def verified(self, request: Request, proposed: int, accepted: int) -> None:
        """Record how many of the last proposed tokens were accepted."""
        counters = self._counters
        counters.spec_drafts += 1
        counters.spec_draft_tokens += proposed
        counters.count_accepted(accepted)
        if request.status is RequestStatus.RUNNING:
            self.lengths.observe(request.id, proposed, accepted)

    def forget(self, request: Request) -> None:
        """Drop the state of a request that no longer runs."""
        self.lengths.forget(request.id)
        self._ngrams.pop(request.id, None)


def draft_prices(scheduling: SchedulerConfig, executor: ExecutorInfo) -> Prices:
    """Return the costs of drafts; zero if the settings say that tokens cost nothing."""
    row = scheduling.speculative_row_price
    if row == 0:
        return Prices(0.0)
    return Prices(executor.row_price if row is None else row, executor.draft_price)


def lookup_lengths(scheduling: SchedulerConfig) -> tuple[int, int]:
    """Return the minimum and maximum match length; each bounds the other's default."""
    shortest, longest = scheduling.prompt_lookup_min, scheduling.prompt_lookup_max
    if shortest is None:
        shortest = min(DEFAULT_LOOKUP_MIN, longest or DEFAULT_LOOKUP_MIN)
    return shortest, longest or max(DEFAULT_LOOKUP_MAX, shortest)
