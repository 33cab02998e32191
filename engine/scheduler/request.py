"""A sequence in the engine."""

import enum
from dataclasses import dataclass, field

from engine.batch.grammars import Grammar
from engine.kv.tiers import Fetch
from engine.scheduler.adapter_slots import NO_ADAPTER
from engine.scheduler.block_table import BlockTable
from engine.shared.block_names import ROOT_DIGEST, adapter_root
from engine.shared.messages import (
    AddRequest,
    EncoderInput,
    KvSource,
    PoolingParams,
    RequestTiming,
    SamplingParams,
    TokenLogprob,
)

NO_SLOT = -1


class RequestStatus(enum.Enum):
    """Lifecycle state of a request."""

    WAITING = enum.auto()
    """In the waiting queue: new, or preempted."""
    RUNNING = enum.auto()
    """Has a slot and blocks and is scheduled."""
    FINISHED = enum.auto()
    """Ended or aborted. Slot and blocks can be held until the steps that use them are done."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A sequence, its tokens and its progress.

    `num_computed_tokens` runs ahead of the executor: it includes tokens whose computation is
    planned. A token that a planned step will sample is *pending* until the step's result is known.
    """

    id: int
    request_id: str
    front_end: int
    arrival: int
    """Order of arrival in this engine."""
    priority: int
    """Lower numbers go first; 0 for all if the scheduling policy ignores priorities."""
    tenant: int
    """Tenant id."""
    group: int
    """Id of the first sequence of the client's request."""
    sampling: SamplingParams
    token_ids: list[int]
    """All known tokens: the prompt, then the output."""
    num_prompt_tokens: int
    max_total_tokens: int
    """Length, prompt included, at which the request ends."""
    stop_ids: frozenset[int]
    """Tokens that end the request (once it has `min_tokens` output tokens)."""
    was_taken_over: bool
    """It arrived with output of another engine, which has already sent the first output."""
    pooling: PoolingParams | None = None
    """Set if it produces a vector instead of tokens."""

    images: list[EncoderInput] = field(default_factory=list)
    """Images of the prompt, by position."""
    image: EncoderInput | None = None
    """While it runs, the image that is partly computed."""
    adapter: str = ""
    """Version of its adapter; empty if none."""
    adapter_slot: int = NO_ADAPTER
    """Slot of the adapter, while it holds a slot itself."""
    last_limited_step: int = 0
    """Newest step in which its request or tenant was limited and it ran."""
    exclusive_steps: int = 0
    """Sampling steps that it has to run alone; above 0 only for suspects."""
    status: RequestStatus = RequestStatus.WAITING
    slot: int = NO_SLOT
    table: BlockTable = field(default_factory=BlockTable)
    num_computed_tokens: int = 0
    queued_tokens: int = 0
    """Tokens to compute before the next one can be sampled; 0 while it decodes."""
    num_pending_tokens: int = 0
    last_sampled_step: int = 0
    """Newest planned step that samples a token of it."""
    num_proposed_tokens: int = 0
    """Draft tokens in flight; the start of the next row depends on how many are accepted."""
    num_steps_in_flight: int = 0
    """Planned steps with a row of this request whose results are not known yet."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at its first admission."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    has_emitted: bool = False
    queued_at: float = 0.0
    """Time of arrival, in seconds of the loop's clock, like the two below."""
    scheduled_at: float | None = None
    """Time at which it was first planned."""
    first_token_at: float = 0.0
    """Time at which the first token sampled here was available."""
    grammar: Grammar | None = None
    """Grammar that constrains its output."""
    kv_source: KvSource | None = None
    """Engine that offers its blocks."""
    fetch: Fetch | None = None
    """Pending fetch of blocks that the KV cache lacks."""
    num_renewals: int = 0
    """Number of recompilations of its grammar."""
    renewed_at: int = -1
    """Number of output tokens at the last recompilation."""
    late_at: int = -1
    """Number of output tokens when its mask was late."""
    late_since: float = 0.0
    """When it was first late at this token."""

    @property
    def is_first_sequence(self) -> bool:
        """Whether it is the first sequence of its client's request."""
        return self.group == self.id

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, including pending ones."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def can_decode(self) -> bool:
        """Whether its next token can be planned, assuming that it runs."""
        return not (
            self.queued_tokens
            or self.num_proposed_tokens  # it is not known which token is its newest
            or self.num_computed_tokens + 1 >= self.max_total_tokens  # its last token is pending
        )

    def timing(self, now: float) -> RequestTiming:
        """Return timings up to the token available `now`, its first or last."""
        scheduled = self.queued_at if self.scheduled_at is None else self.scheduled_at
        first = self.first_token_at
        return RequestTiming(
            scheduled - self.queued_at, first - scheduled, now - first, self.num_preemptions
        )

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs were requested and not all are computed."""
        return (
            self.sampling.prompt_logprobs is not None
            and not self.was_taken_over
            and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
        )


def precedence(request: Request) -> tuple[int, int]:
    """Return the sort key of a tenant's requests: the smallest goes first."""
    return request.priority, request.arrival


def request_from_message(
    message: AddRequest,
    *,
    arrival: int,
    priority: int,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    now: float = 0.0,
) -> Request:
    """Build a request from a front end's message."""
    sampling = message.sampling
    stop_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= eos_token_ids
    num_prompt_tokens = len(message.prompt_token_ids)
    token_ids = message.prompt_token_ids + message.output_token_ids
    longest = min(num_prompt_tokens + sampling.max_tokens, max_model_len)
    if message.pooling is not None:
        longest = num_prompt_tokens + 1  # the sample after the prompt stands for its vector
    return Request(
        id=message.id,
        request_id=message.request_id,
        front_end=message.front_end,
        arrival=arrival,
        priority=priority,
        tenant=message.tenant,
        group=message.group or message.id,
        sampling=sampling,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        max_total_tokens=longest,
        stop_ids=stop_ids,
        was_taken_over=bool(message.output_token_ids),
        pooling=message.pooling,
        adapter=message.adapter,
        images=message.encoder_inputs.copy(),
        table=BlockTable(
            adapter_root(message.cache_root or ROOT_DIGEST, message.adapter),
            message.encoder_inputs,
            offered=message.offers_blocks,
        ),
        kv_source=message.kv_source,
        exclusive_steps=message.exclusive_steps,
        queued_tokens=len(token_ids),
        queued_at=now,
    )
