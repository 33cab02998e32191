"""GET and POST /admin/*."""

import msgspec
from pydantic import Field

from engine.messages import UtilityValue
from server.schemas.common import RequestBody


class EngineStatus(msgspec.Struct):
    """One engine as this front end knows it."""

    rank: int
    incarnation: int
    ready: bool
    host: str
    restarts: int
    running: int
    waiting: int
    kv_usage: float
    """Share of KV blocks in use, 0 to 1."""
    queued_prefill_tokens: int
    stats_age: float | None
    """Seconds since the newest stats came; null before the first."""
    num_kv_blocks: int | None = None
    max_num_seqs: int | None = None


class EngineList(msgspec.Struct):
    """All engines, by rank, and the state that they share."""

    engines: list[EngineStatus]
    wave: int
    running: bool
    num_front_ends: int


class UtilityRequest(RequestBody):
    """A utility of the engines, by name."""

    name: str = Field(min_length=1, max_length=100)
    arguments: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    rank: int | None = Field(None, ge=0, description="The engine to ask; default: all.")


class UtilityAnswer(msgspec.Struct):
    """What one engine answered."""

    rank: int
    result: UtilityValue | dict[str, UtilityValue]
    error: str | None


class UtilityAnswers(msgspec.Struct):
    """What the engines answered, by rank."""

    answers: list[UtilityAnswer]
