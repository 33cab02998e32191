"""What a scheduler says about itself: gauges, and plans in flight in words."""

from typing import NamedTuple

from engine.batch.batch import BatchPlan
from engine.scheduler.request import Request


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
    planned_at: float = 0.0
    """In seconds of the loop's clock."""

    def describe(self) -> str:
        """Return what is computed, in numbers and names only (never a prompt), for the log."""
        plan, requests, *_ = self
        head = (
            f"step {plan.step}: {len(requests)} rows, {plan.num_tokens} tokens, "
            f"{len(plan.starting)} starting"
        )
        rows = [
            f"  {request.id} ({request.request_id}): slot {slot}, start {start}, "
            f"count {count}, {request.num_tokens} tokens, {request.table.num_blocks} blocks"
            for request, slot, start, count in zip(
                requests, plan.slots, plan.starts, plan.counts, strict=True
            )
        ]
        return "\n".join([head, *rows])
