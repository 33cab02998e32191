"""What a scheduler says about itself: counters, gauges, and plans in flight in words."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.scheduler.batch import BatchPlan
from engine.scheduler.request import Request
from engine.shared.messages import STEP_TOKENS_BOUNDS


@dataclass(slots=True)
class Counters:
    """Counts since the engine started."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    spec_drafts: int = 0
    """Rows with guessed tokens."""
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    grammar_requests: int = 0
    grammar_waits: int = 0
    """Requests whose grammar had to be compiled first."""
    step_tokens: int = 0
    """Tokens of all steps: computed for prompts, or drawn."""
    step_tokens_buckets: list[int] = field(
        default_factory=lambda: [0] * (len(STEP_TOKENS_BOUNDS) + 1)
    )
    """Steps by their tokens, see `engine.shared.messages.EngineStats`."""

    def count_step(self, tokens: int) -> None:
        """Count a step that computed or drew so many tokens."""
        self.step_tokens += tokens
        self.step_tokens_buckets[bisect_left(STEP_TOKENS_BOUNDS, tokens)] += 1


class Gauges(NamedTuple):
    """The load right now."""

    waiting: int
    running: int
    kv_usage: float
    queued_prefill_tokens: int


class InFlight(NamedTuple):
    """A plan whose result is not known, with the request of each row."""

    plan: BatchPlan
    requests: list[Request]
    num_prefill_tokens: int

    def describe(self) -> str:
        """Return what is computed, in numbers and names only (never a prompt), for the log."""
        plan, requests, _ = self
        head = (
            f"step {plan.step}: {len(requests)} rows, {plan.num_tokens} tokens, "
            f"{len(plan.starting)} starting"
        )
        rows = [
            f"  {request.id} ({request.request_id}): slot {slot}, start {start}, "
            f"count {count}, {request.num_tokens} tokens, {len(request.table.block_ids)} blocks"
            for request, slot, start, count in zip(
                requests, plan.slots, plan.starts, plan.counts, strict=True
            )
        ]
        return "\n".join([head, *rows])
