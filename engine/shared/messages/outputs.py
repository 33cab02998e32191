"""Outputs: from engines to front ends."""

from bisect import bisect_left
from copy import copy
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.shared.messages.adapters import AdapterLoad
from engine.shared.messages.requests import UtilityValue
from engine.shared.messages.wire import Message


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one chosen token with its alternatives, best first."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]


STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram of tokens per step."""

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestTiming(msgspec.Struct, frozen=True, array_like=True):
    """Durations of a request in one engine, in seconds of that engine's monotonic clock."""

    queue: float
    """From arrival to the first step that includes it."""
    prefill: float
    """From there to its first token on this engine; includes preemptions."""
    decode: float = 0.0
    """From the first to the last token; includes preemptions; 0 except on the last output."""
    preemptions: int = 0
    """Number of preemptions on this engine."""


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """The result of one step for one request."""

    id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the request when `finish_reason` is "stop"."""
    logprobs: list[TokenLogprob] | None = None
    """One per element of `token_ids` if requested."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One per prompt token but the first, on the first output, if requested."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache (on the first output)."""
    error: str | None = None
    """Reason when `finish_reason` is "error"."""
    timing: RequestTiming | None = None
    """On an engine's first and last output with tokens."""
    refused: bool = False
    """The error is the request's fault: it would fail on other engines too."""
    error_param: str | None = None
    """The offending field, if known."""
    pooled: bytes | None = None
    """Result of a request with `pooling`, as float32 bytes; on its only output."""
    no_room: bool = False
    """It failed for lack of capacity on this engine: it can be retried later."""


class Received(msgspec.Struct, frozen=True, array_like=True):
    """Cumulative counts of what an engine received from, and sent to, one front-end process.

    `front_end_incarnation` distinguishes a restarted front end from its predecessor.
    `prompt_tokens` counts all tokens to prefill: for a request that another engine began, also its
    output tokens so far.
    """

    front_end: int
    front_end_incarnation: int
    requests: int
    prompt_tokens: int
    outputs: int = 0
    """Output messages created for it, including the one with these stats."""


def _counter(name: str, help: str) -> Meta:
    """Return metadata that makes a field a counter of /metrics, with its name and help."""
    return Meta(title=name, description=help)


class EngineCounters(msgspec.Struct, array_like=True):
    """An engine's counters since it started; the code that counts an event increments its field.

    Fields with `_counter` are exported to /metrics.
    """

    prefix_cache_queries: Annotated[
        int, _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    ] = 0
    prefix_cache_hits: Annotated[
        int, _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
    ] = 0
    preemptions: Annotated[
        int, _counter("num_preemptions", "Sequences preempted for lack of KV blocks.")
    ] = 0
    prompt_tokens: Annotated[
        int, _counter("engine_prompt_tokens", "Prompt tokens computed by the engine.")
    ] = 0
    generation_tokens: Annotated[
        int, _counter("engine_generation_tokens", "Tokens sampled by the engine.")
    ] = 0
    spec_drafts: Annotated[
        int,
        _counter(
            "spec_decode_num_drafts", "Steps of sequences in which draft tokens were verified."
        ),
    ] = 0
    spec_draft_tokens: Annotated[
        int, _counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
    ] = 0
    spec_accepted_tokens: Annotated[
        int, _counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
    ] = 0
    grammar_requests: Annotated[
        int, _counter("structured_output_requests", "Requests with a grammar for their output.")
    ] = 0
    grammar_waits: Annotated[
        int,
        _counter(
            "structured_output_waits",
            "Requests whose grammar had to be compiled before they could run.",
        ),
    ] = 0
    dummy_steps: Annotated[
        int, _counter("dummy_steps", "Steps without work that keep a lockstep group together.")
    ] = 0
    step_tokens: int = 0
    """Tokens computed or sampled, over all steps."""
    step_tokens_buckets: list[int] = msgspec.field(
        default_factory=lambda: [0] * (len(STEP_TOKENS_BOUNDS) + 1)
    )
    """Histogram of tokens per step: a bucket for each of `STEP_TOKENS_BOUNDS` (not cumulative), and
    one above."""
    spec_accepted_at: list[int] = []
    """Accepted draft tokens by position in their drafts."""
    pooled_sequences: Annotated[
        int, _counter("engine_pooled_sequences", "Sequences that were pooled.")
    ] = 0
    spec_skipped: Annotated[
        int,
        _counter(
            "spec_decode_num_skipped",
            "Steps of sequences whose draft was skipped because it would not have paid off.",
        ),
    ] = 0
    kv_tier_hits: Annotated[
        int, _counter("kv_tier_hits", "Tokens whose keys and values were read from the KV tiers.")
    ] = 0
    kv_tier_stored_bytes: Annotated[
        int, _counter("kv_tier_stored_bytes", "Bytes written to the KV tiers.")
    ] = 0
    kv_tier_dropped_blocks: Annotated[
        int,
        _counter("kv_tier_dropped_blocks", "KV blocks that the tiers dropped: too slow, or full."),
    ] = 0
    kv_tier_errors: Annotated[
        int,
        _counter("kv_tier_errors", "KV blocks that could not be written or read, or were damaged."),
    ] = 0
    sleeps: Annotated[int, _counter("engine_sleeps", "Times that the engine released memory.")] = 0
    sleep_seconds: Annotated[
        float, _counter("engine_sleep_seconds", "Seconds spent releasing memory.")
    ] = 0.0
    wake_ups: Annotated[
        int, _counter("engine_wake_ups", "Times that it restored memory, or a part.")
    ] = 0
    wake_up_seconds: Annotated[
        float, _counter("engine_wake_up_seconds", "Seconds spent restoring memory.")
    ] = 0.0

    encoder_cache_queries: Annotated[
        int,
        _counter(
            "encoder_cache_queries",
            "Images (or tiles) of prompts looked up in the encoder cache.",
        ),
    ] = 0
    encoder_cache_hits: Annotated[
        int, _counter("encoder_cache_hits", "Images found in the encoder cache.")
    ] = 0
    encoded_images: Annotated[
        int, _counter("encoded_images", "Images (or tiles) that were encoded.")
    ] = 0

    kv_transfer_hits: Annotated[
        int,
        _counter("kv_transfer_hits", "Tokens whose keys and values came from another engine."),
    ] = 0
    kv_transfer_bytes: Annotated[
        int, _counter("kv_transfer_bytes", "Bytes of KV blocks received from other engines.")
    ] = 0
    kv_transfer_sent_bytes: Annotated[
        int, _counter("kv_transfer_sent_bytes", "Bytes of KV blocks sent to other engines.")
    ] = 0
    kv_transfer_seconds: Annotated[
        float,
        _counter("kv_transfer_seconds", "Seconds that requests waited for transfers."),
    ] = 0.0
    kv_transfer_failures: Annotated[
        int,
        _counter(
            "kv_transfer_failures",
            "Incomplete transfers; missing blocks are computed.",
        ),
    ] = 0
    kv_transfer_dropped_blocks: Annotated[
        int,
        _counter(
            "kv_transfer_dropped_blocks",
            "KV blocks offered to other engines that did not fit, or were not read.",
        ),
    ] = 0
    kv_transfer_offered_bytes: int = 0
    """Bytes of copies that wait for readers now, or did within the last second."""

    def count_sleep(self, seconds: float) -> None:
        """Count a sleep that took `seconds`."""
        self.sleeps += 1
        self.sleep_seconds += seconds

    def count_wake_up(self, seconds: float) -> None:
        """Count a full or partial wake-up that took `seconds`."""
        self.wake_ups += 1
        self.wake_up_seconds += seconds

    def count_accepted(self, tokens: int) -> None:
        """Count a draft of which the first `tokens` tokens were accepted."""
        self.spec_accepted_tokens += tokens
        self.spec_accepted_at += [0] * (tokens - len(self.spec_accepted_at))
        for position in range(tokens):
            self.spec_accepted_at[position] += 1

    def count_step(self, tokens: int) -> None:
        """Count a step that computed or sampled `tokens` tokens."""
        self.step_tokens += tokens
        self.step_tokens_buckets[bisect_left(STEP_TOKENS_BOUNDS, tokens)] += 1

    def snapshot(self) -> "EngineCounters":
        """Return an independent copy."""
        taken = copy(self)
        taken.step_tokens_buckets = self.step_tokens_buckets.copy()
        taken.spec_accepted_at = self.spec_accepted_at.copy()
        return taken


class ExpertLoad(msgspec.Struct, array_like=True, frozen=True):
    """Balance of expert computation over the processes of a group."""

    imbalance: float = 0.0
    """Load of the busiest process relative to the mean; 0: unknown."""
    moved_layers: int = 0
    """Number of times that a layer's experts were rebalanced."""


class EngineStats(Message, frozen=True):
    """One engine's load and counters, stamped with (incarnation, wave, step).

    Gauges are the state after `step`. `version` grows with every snapshot, so that of two stats
    with the same incarnation the one with the larger version is newer, even if no step ran between
    them.
    """

    rank: int
    incarnation: int
    version: int
    wave: int
    step: int
    waiting: int
    running: int
    kv_usage: float
    """Share of KV blocks in use by live requests, 0 to 1."""
    queued_prefill_tokens: int
    """Prompt tokens received but not yet computed (waiting requests and partial prefills)."""
    received: list[Received] = []
    counters: EngineCounters = msgspec.field(default_factory=EngineCounters)
    topology: int = 0
    """Newest formation of the engine's lockstep group; only grows."""
    wave_running: bool = False
    """Whether the engine's lockstep group runs `wave`; unused by independent engines."""
    hold_epoch: int = 0
    """Newest hold known to the engine; odd means held (see `engine.lockstep.wave`)."""
    halted: bool = False
    """Paused or asleep by an operator's order: requests wait, and no progress is expected."""
    deferred: int = 0
    """Waiting requests that wait for grammar compilation, not for a slot."""
    exclusive_request: int = 0
    """Id of the request that runs alone from the next step on (see `AddRequest.exclusive_steps`): a
    failure of the engine is attributed to it. 0: none."""
    hands_over: bool = False
    """Halted, and its requests have to move to engines that are not."""
    adapters: AdapterLoad | None = None
    """Adapters used by its steps; None for an engine without adapters."""
    sleep_level: int = 0
    """1 or 2 while the engine is asleep; 0 while it is awake, even if paused."""
    experts: ExpertLoad | None = None
    """None if expert load is not measured."""
    weight_version: str = ""
    """Version name of the weights; empty for the configured ones."""


class StepOutputs(Message, frozen=True):
    """All outputs of one step for one front end, with the engine's stats.

    Without outputs it reports only a change of the stats: the engine was halted or resumed, or
    started or stopped running one request alone.
    """

    stats: EngineStats
    outputs: list[RequestOutput]


class UtilityResult(Message, frozen=True):
    """Answer to a `UtilityCall`: a JSON-like result, or an actionable error."""

    call_id: int
    rank: int
    result: UtilityValue | dict[str, UtilityValue] = None
    error: str | None = None


class EngineDead(Message, frozen=True):
    """Last message of an engine that has failed."""

    rank: int
    incarnation: int
    reason: str


class KvBlocks(Message, frozen=True):
    """Changes to the set of KV blocks that an engine holds.

    Blocks are named by `engine.shared.block_names.short_name`, concatenated. For a model with
    several cache groups, only one group's blocks are reported.
    """

    rank: int
    incarnation: int
    after: int
    """Number of the last change before these; `ALL_BLOCKS`: this replaces all earlier reports."""
    number: int
    """Number of the newest change included."""
    stored: bytes
    removed: bytes


EngineOutput = StepOutputs | UtilityResult | EngineDead | KvBlocks
