"""Builds a batch plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.batch.batch import BatchPlan, SlotBlocks, SlotStart
from engine.scheduler.request import Request
from engine.shared.messages import EncoderInput


class _Row(NamedTuple):
    request: Request
    start: int
    num_tokens: int
    sample: bool
    proposed: Sequence[int] = ()


@dataclass(slots=True)
class PlanBuilder:
    """Collects the rows of one step and updates the counters of their requests."""

    step: int
    """Step number."""
    now: float = 0.0
    """Planning time."""
    starting: list[SlotStart] = field(default_factory=list)
    blocks: list[SlotBlocks] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    prefills: list[_Row] = field(default_factory=list)
    proposed: dict[int, list[int]] = field(default_factory=dict)
    """Draft tokens that a planned decode also verifies, by request."""
    adapters: dict[int, str] = field(default_factory=dict)
    """Versions of the adapters to place, by slot."""
    encoded: list[EncoderInput] = field(default_factory=list)
    """Images to encode."""
    evicted_images: list[bytes] = field(default_factory=list)
    """Digests of images that the executor has to evict."""
    short_of_blocks: bool = False
    """A running request did not get a block, so no others are admitted."""

    def start(self, request: Request) -> None:
        """Assign the request to its slot, with all its blocks."""
        if request.scheduled_at is None:
            request.scheduled_at = self.now
        self.starting.append(
            SlotStart(
                request.slot,
                request.token_ids.copy(),
                request.num_prompt_tokens,
                request.sampling,
                request.pooling,
                request.adapter_slot,
                request.table.images,
            )
        )
        self.add_blocks(request)

    def add_blocks(self, request: Request) -> None:
        """Add the request's new blocks, not yet in any plan."""
        self.blocks += request.table.take_new(request.slot)

    def decode(self, request: Request) -> None:
        """Plan a decode of the request's newest token, with sampling."""
        request.num_computed_tokens += 1
        request.num_pending_tokens += 1
        request.last_sampled_step = self.step
        request.num_steps_in_flight += 1
        self.decodes.append(request)

    def prefill(self, request: Request, count: int) -> None:
        """Plan `count` more tokens of a prefill, with sampling if they are its last."""
        if request.table.num_unsent:
            self.add_blocks(request)
        start = request.num_computed_tokens
        end = start + count
        sample = end == request.num_tokens
        request.num_computed_tokens = end
        request.queued_tokens -= count
        request.num_pending_tokens += sample
        if sample:
            request.last_sampled_step = self.step
        request.num_steps_in_flight += 1
        self.prefills.append(_Row(request, start, count, sample))

    def seal(self) -> tuple[BatchPlan, list[Request]]:
        """Return the plan, and the request of each row."""
        # Executors can rely on single-token rows coming before all others.
        longer = [
            _Row(request, request.num_computed_tokens - 1, 1 + len(proposed), True, proposed)
            for request in (self.decodes if self.proposed else ())
            if (proposed := self.proposed.get(request.id))
        ]
        longer = sorted(longer + self.prefills, key=lambda row: row.num_tokens > 1)
        plain = [request for request in self.decodes if not request.num_proposed_tokens]
        requests = plain + [row.request for row in longer]
        num_plain = len(plain)
        plan = BatchPlan(
            step=self.step,
            starting=self.starting,
            blocks=self.blocks,
            slots=[request.slot for request in requests],
            starts=[request.num_computed_tokens - 1 for request in plain]
            + [row.start for row in longer],
            counts=[1] * num_plain + [row.num_tokens for row in longer],
            samples=[True] * num_plain + [row.sample for row in longer],
            proposed={
                i: list(row.proposed) for i, row in enumerate(longer, num_plain) if row.proposed
            },
            adapters=self.adapters,
            encoded=self.encoded,
            evicted_images=self.evicted_images,
        )
        return plan, requests
