"""GET /status.json: the cluster as one front end sees it."""

import msgspec

from engine.shared.messages import AbsenceReason
from engine.shared.pooling import Task, TokenTask


class EngineCounts(msgspec.Struct):
    """What an engine last reported; names ending in `_total` count since its process began."""

    step: int
    waiting: int
    running: int
    kv_usage: float
    """Share of KV blocks in use, 0 to 1."""
    queued_prefill_tokens: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    preemptions_total: int
    dummy_steps_total: int


class EngineOverview(msgspec.Struct):
    """One engine."""

    rank: int
    incarnation: int
    """Random number of its process: counts of another one cannot be compared."""
    host: str
    ready: bool
    restarts: int
    num_kv_blocks: int | None
    block_size: int | None
    max_model_len: int | None
    stats_age: float | None
    """Seconds since the newest stats arrived."""
    counts: EngineCounts | None
    halted: bool = False
    """Paused or asleep by an operator's order."""
    draining: bool = False
    """It finishes what it has and ends."""
    batch_invariant: bool | None = None
    """Whether no token depends on what shares its step."""


class MissingOverview(msgspec.Struct):
    """An engine that there shall be and is not."""

    rank: int
    reason: AbsenceReason
    """not_joined: it has never come; died: it said so, or its supervisor saw it; silent: it was
    not heard for too long; drained: it left by order; refused: it holds other weights than the
    others."""
    age: float
    """Seconds for which it has been missed."""


class FirstTokenTimes(msgspec.Struct):
    """Times to first token of all streams on this node since it began, in seconds."""

    sum: float
    count: int


class StatusResponse(msgspec.Struct):
    """The cluster as one front end sees it: engines, wave, front ends."""

    version: str
    models: list[str]
    has_chat_template: bool
    """Whether chat completions can be asked for."""
    takes_images: bool
    """Whether they may show images."""
    pooling_task: Task | TokenTask | None
    """What a model that makes vectors does; None if the model generates text."""
    time: float
    """Unix time of this answer."""
    started: int
    """Unix time at which the answering front end began to serve."""
    ready: bool
    """Whether at least one engine can serve."""
    wave: int
    running: bool
    """Whether the engines run; false while all are paused."""
    num_front_ends: int
    wakeups_total: dict[str, int]
    """How often paused engines were woken, by source."""
    first_token_times: FirstTokenTimes
    engines: list[EngineOverview]
    num_expected: int = 0
    """How many engines there shall be."""
    missing: list[MissingOverview] = []
