"""Which draft tokens are proposed for which request, and how many are accepted."""

from typing import Protocol

from engine.scheduler.admission import StepBudget
from engine.scheduler.batch import TO_BE_DRAFTED
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.ngram import NgramIndex
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.request import Request
from engine.scheduler.turns import Turns
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

    def __init__(self, scheduling: SchedulerConfig, counters: EngineCounters) -> None:
        self._max = scheduling.max_draft_tokens
        self._proposer: Proposer = ModelProposer()
        if not scheduling.drafts_with_model:
            self._proposer = NgramProposer(*lookup_lengths(scheduling))
        self._counters = counters
        self._lengths: dict[int, int] = {}
        """Tokens to propose next: as many as may be while all are accepted, fewer while none is."""

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
            end = start + len(proposed)
            wants_blocks = end > table.capacity and not plan.short_of_blocks
            if wants_blocks and kv.try_grow(table, end, headroom=headroom):
                plan.tell_blocks(request)
            proposed = proposed[: table.capacity - start]
            if proposed:
                proposed = proposed[: turns.drafts(request, len(proposed))]
            if proposed:
                budget.speculate(len(proposed))
                plan.propose(request, proposed)

    def _propose(self, request: Request, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the request's known ones."""
        count = min(most, self._lengths.setdefault(request.id, self._max))
        return self._proposer.propose(request, count) if count > 0 else []

    def verified(self, request: Request, proposed: int, accepted: int) -> None:
        """This many of the tokens proposed last were accepted."""
        counters = self._counters
        counters.spec_drafts += 1
        counters.spec_draft_tokens += proposed
        counters.count_accepted(accepted)
        length = self._lengths.get(request.id)
        if length is None:
            return
        if accepted == proposed:
            self._lengths[request.id] = min(self._max, 2 * length)
        elif accepted == 0:
            self._lengths[request.id] = max(1, length // 2)

    def forget(self, request: Request) -> None:
        """The request does not run any more."""
        self._lengths.pop(request.id, None)
        self._proposer.forget(request)

    @property
    def num_tracked(self) -> int:
        """Number of requests with drafts that are remembered."""
        return len(self._lengths)


def lookup_lengths(scheduling: SchedulerConfig) -> tuple[int, int]:
    """Return the minimum and maximum tokens to compare; each bounds the other's default."""
    shortest, longest = scheduling.prompt_lookup_min, scheduling.prompt_lookup_max
    if shortest is None:
        shortest = min(DEFAULT_LOOKUP_MIN, longest or DEFAULT_LOOKUP_MIN)
    return shortest, longest or max(DEFAULT_LOOKUP_MAX, shortest)
