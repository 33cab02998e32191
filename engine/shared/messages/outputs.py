"""Outputs: from engines to front ends."""

from typing import Literal

import msgspec

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
    """From its first token to its last; preemptions included. 0 on an output that is not the last.
    """


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


class Received(msgspec.Struct, frozen=True, array_like=True):
    """What an engine had received from one front-end process, and made for it, as of its stats.

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


class EngineStats(Message, frozen=True):
    """One engine's load and counters, stamped with (incarnation, wave, step).

    Gauges are the state after `step`; `*_total` fields are counts since the engine started.
    `version` grows with every stats an engine takes, so that of two stats with the same
    incarnation the larger version is the newer, also while no step is taken.
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
    prefix_cache_queries_total: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits_total: int = 0
    """Prompt tokens found there."""
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    dummy_steps_total: int = 0
    topology: int = 0
    """Which formation of its lockstep group the engine belongs to; only grows."""
    wave_running: bool = False
    """Whether the engine's lockstep group runs `wave`; unused by independent engines."""
    hold_epoch: int = 0
    """Newest hold that the engine knows of; odd means held (see `engine.lockstep.wave`)."""
    halted: bool = False
    """Paused or asleep by an operator's order: requests wait, and no progress is due."""
    spec_drafts_total: int = 0
    """Times that tokens of a request were guessed (see `--speculative-ngram`)."""
    spec_draft_tokens_total: int = 0
    """Tokens guessed."""
    spec_accepted_tokens_total: int = 0
    """Guessed tokens that were right."""
    grammar_requests_total: int = 0
    """Requests held to a grammar."""
    grammar_waits_total: int = 0
    """Those of them whose grammar had to be compiled first."""
    step_tokens_buckets: list[int] = []
    """Steps by how many tokens they computed or drew: as many as each of `STEP_TOKENS_BOUNDS` at
    most (and more than the one before), and more than all of them."""
    step_tokens_total: int = 0
    """Sum of these tokens."""
    deferred: int = 0
    """Those of the waiting requests that wait for their grammar to be compiled, not for a slot."""
    alone: int = 0
    """Id of the request that runs alone from the next step on (see `AddRequest.alone`): what
    happens to the engine now is its doing and nobody else's. 0: all run together."""
    hands_over: bool = False
    """Halted, and what it holds is to go to engines that are not."""


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
    """Last words of an engine that cannot go on."""

    rank: int
    incarnation: int
    reason: str


EngineOutput = StepOutputs | UtilityResult | EngineDead
