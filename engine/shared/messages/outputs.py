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
"""Upper bounds of the classes in which steps are counted by their tokens."""

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestTiming(msgspec.Struct, frozen=True, array_like=True):
    """How long a request took in one engine, in seconds of that engine's monotonic clock."""

    queue: float
    """From its arrival to the first step that it was planned for."""
    prefill: float
    """From there to its first token there; preemptions included."""
    decode: float = 0.0
    """From its first token to its last, preemptions included; 0 on all outputs but the last."""
    preemptions: int = 0
    """How often it was preempted there."""


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one request."""

    id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the request when `finish_reason` is "stop"."""
    logprobs: list[TokenLogprob] | None = None
    """One per element of `token_ids` when asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One per prompt token but the first, on the first output, when asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache (on the first output)."""
    error: str | None = None
    """What went wrong when `finish_reason` is "error"."""
    timing: RequestTiming | None = None
    """On the first and the last output with tokens of an engine."""
    refused: bool = False
    """It went wrong because of what the request asks for: another engine would not do better."""
    error_param: str | None = None
    """The field that asks for it, if it is known."""
    pooled: bytes | None = None
    """The vector of a request with `pooling`, as float32 numbers; its only output has it."""
    no_room: bool = False
    """It went wrong because this engine has no room for it now: it may be sent again later."""


class Received(msgspec.Struct, frozen=True, array_like=True):
    """What an engine had received from one front-end process, and sent to it, as of its stats.

    `front_end_incarnation` tells a restarted front end from its predecessor. The counts only grow.
    `prompt_tokens` counts whatever has to be computed first: for a request that another engine
    began, its tokens so far too.
    """

    front_end: int
    front_end_incarnation: int
    requests: int
    prompt_tokens: int
    outputs: int = 0
    """Messages with outputs that were made for it, the one that carries these stats included."""


def _counter(name: str, help: str) -> Meta:
    """Return what makes a field a counter of /metrics: its name there, and its help."""
    return Meta(title=name, description=help)


class EngineCounters(msgspec.Struct, array_like=True):
    """An engine's counters since it started; whoever counts something adds to its field.

    A field with a `_counter` is one of /metrics.
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
    """Tokens of all steps: computed for prompts, or drawn."""
    step_tokens_buckets: list[int] = msgspec.field(
        default_factory=lambda: [0] * (len(STEP_TOKENS_BOUNDS) + 1)
    )
    """Steps by these tokens: as many as each of `STEP_TOKENS_BOUNDS` at most (and more than the
    one before), and more than all of them."""
    spec_accepted_at: list[int] = []
    """Draft tokens that were accepted, by their positions in their drafts."""
    pooled_sequences: Annotated[
        int, _counter("engine_pooled_sequences", "Sequences that got a vector.")
    ] = 0
    spec_skipped: Annotated[
        int,
        _counter(
            "spec_decode_num_skipped",
            "Steps of sequences without the draft that they could have had: it would "
            "not have paid.",
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
        _counter(
            "kv_tier_dropped_blocks", "KV blocks that the tiers did not take: too slow, or full."
        ),
    ] = 0
    kv_tier_errors: Annotated[
        int,
        _counter("kv_tier_errors", "KV blocks that could not be written or read, or were damaged."),
    ] = 0
    sleeps: Annotated[int, _counter("engine_sleeps", "Times that the engine gave memory back.")] = 0
    sleep_seconds: Annotated[
        float, _counter("engine_sleep_seconds", "Seconds that giving memory back took.")
    ] = 0.0
    wake_ups: Annotated[
        int, _counter("engine_wake_ups", "Times that it had memory, or some, back.")
    ] = 0
    wake_up_seconds: Annotated[
        float, _counter("engine_wake_up_seconds", "Seconds that having it back took.")
    ] = 0.0

    encoder_cache_queries: Annotated[
        int,
        _counter(
            "encoder_cache_queries",
            "Images (or tiles) of prompts looked up among the encoded ones.",
        ),
    ] = 0
    encoder_cache_hits: Annotated[
        int, _counter("encoder_cache_hits", "Images that were encoded already.")
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
        _counter("kv_transfer_seconds", "Seconds that requests waited for KV blocks of others."),
    ] = 0.0
    kv_transfer_failures: Annotated[
        int,
        _counter(
            "kv_transfer_failures",
            "Transfers that did not bring all blocks; the others are computed.",
        ),
    ] = 0
    kv_transfer_dropped_blocks: Annotated[
        int,
        _counter(
            "kv_transfer_dropped_blocks",
            "KV blocks that were to be offered to others and had no room, or found no reader.",
        ),
    ] = 0
    kv_transfer_offered_bytes: int = 0
    """Of copies that wait for their readers now, or did within the last second."""

    def count_sleep(self, seconds: float) -> None:
        """Count that memory was given back, which took so long."""
        self.sleeps += 1
        self.sleep_seconds += seconds

    def count_wake_up(self, seconds: float) -> None:
        """Count that memory, or a part of it, was had back, which took so long."""
        self.wake_ups += 1
        self.wake_up_seconds += seconds

    def count_accepted(self, tokens: int) -> None:
        """Count a draft whose first tokens, this many, were accepted."""
        self.spec_accepted_tokens += tokens
        self.spec_accepted_at += [0] * (tokens - len(self.spec_accepted_at))
        for place in range(tokens):
            self.spec_accepted_at[place] += 1

    def count_step(self, tokens: int) -> None:
        """Count a step that computed or drew so many tokens."""
        self.step_tokens += tokens
        self.step_tokens_buckets[bisect_left(STEP_TOKENS_BOUNDS, tokens)] += 1

    def snapshot(self) -> "EngineCounters":
        """Return a copy that stays as it is."""
        taken = copy(self)
        taken.step_tokens_buckets = self.step_tokens_buckets.copy()
        taken.spec_accepted_at = self.spec_accepted_at.copy()
        return taken


class ExpertLoad(msgspec.Struct, array_like=True, frozen=True):
    """How evenly the engines of a group share out the work of experts."""

    imbalance: float = 0.0
    """What the fullest process computed, as a multiple of the mean; 0: not known yet."""
    moved_layers: int = 0
    """How often the experts of a layer have been dealt out anew."""


class EngineStats(Message, frozen=True):
    """One engine's load and counters, stamped with (incarnation, wave, step).

    Gauges are the state after `step`. `version` grows with every stats an engine takes, so that
    of two stats with the same incarnation the larger version is the newer, also while no step is
    taken.
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
    """Prompt tokens received and not yet computed (waiting requests and partial prefills)."""
    received: list[Received] = []
    counters: EngineCounters = msgspec.field(default_factory=EngineCounters)
    topology: int = 0
    """Which formation of its lockstep group the engine belongs to; only grows."""
    wave_running: bool = False
    """Whether the engine's lockstep group runs `wave`; unused by independent engines."""
    hold_epoch: int = 0
    """Newest hold that the engine knows of; odd means held (see `engine.lockstep.wave`)."""
    halted: bool = False
    """Paused or asleep by an operator's order: requests wait, and no progress is due."""
    deferred: int = 0
    """Waiting requests that wait for their grammar to be compiled, not for a slot."""
    alone: int = 0
    """Id of the request that runs alone from the next step on (see `AddRequest.alone`): what
    happens to the engine now is its doing and nobody else's. 0: all run together."""
    hands_over: bool = False
    """Halted, and its requests have to move to engines that are not."""
    adapters: AdapterLoad | None = None
    """What its steps are computed with; None for an engine without adapters."""
    sleep_level: int = 0
    """1 or 2 while the engine is asleep; 0 while it is awake, though it may be paused."""
    experts: ExpertLoad | None = None
    """None where the load of experts is not measured."""
    weight_version: str = ""
    """What the weights are called; empty for those of the settings."""


class StepOutputs(Message, frozen=True):
    """All outputs of one step that belong to one front end, with the engine's stats.

    Without outputs only the stats are news: that the engine was halted or goes on, that it runs
    one request alone or all together again.
    """

    stats: EngineStats
    outputs: list[RequestOutput]


class UtilityResult(Message, frozen=True):
    """Answer to a `UtilityCall`: a JSON-like result, or an error that says what to do."""

    call_id: int
    rank: int
    result: UtilityValue | dict[str, UtilityValue] = None
    error: str | None = None


class EngineDead(Message, frozen=True):
    """Last message of an engine that cannot go on."""

    rank: int
    incarnation: int
    reason: str


class KvBlocks(Message, frozen=True):
    """Which KV blocks of an engine can be found, and which cannot any more.

    Blocks are named by `engine.shared.block_names.short_name`, one after the other. Of a model
    with several groups of layers, those of one group are told.
    """

    rank: int
    incarnation: int
    after: int
    """The number of changes that this continues; `ALL_BLOCKS`: what was known before is void."""
    number: int
    """Of the newest change in it."""
    stored: bytes
    removed: bytes


EngineOutput = StepOutputs | UtilityResult | EngineDead | KvBlocks
