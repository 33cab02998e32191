"""What vLLM's paths for operators take and answer."""

from typing import Any, Literal

import msgspec
from pydantic import Field

from server.limits import MAX_TOKENS
from server.schema.body import RequestBody

MAX_RPC_TIMEOUT = 600


class PauseStatus(msgspec.Struct):
    """It is done."""

    status: Literal["paused", "resumed"]


class IsPaused(msgspec.Struct):
    """Whether every engine is paused or asleep."""

    is_paused: bool


class IsSleeping(msgspec.Struct):
    """Whether every engine is asleep."""

    is_sleeping: bool


class Done(msgspec.Struct):
    """It is done, in words."""

    message: str


class ScaleEpRequest(RequestBody):
    """How many engines there shall be."""

    new_data_parallel_size: int = Field(ge=1, le=1024)
    drain_timeout: int = Field(
        120, ge=1, le=3600, description="Seconds after which the answer comes in any case."
    )


class IsScaling(msgspec.Struct):
    """Whether engines are being added, retired or replaced."""

    is_scaling_elastic_ep: bool


class RpcRequest(RequestBody):
    """A method of a worker extension, see docs/operators.md."""

    method: str = Field(min_length=1, max_length=200)
    args: list[Any] = Field(default_factory=list, max_length=100)
    kwargs: dict[str, Any] = Field(default_factory=dict, max_length=100)
    timeout: float | None = Field(None, gt=0, le=MAX_RPC_TIMEOUT)
    rank: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="The engine to ask; default: all."
    )


class RpcResults(msgspec.Struct):
    """What the method returned in each engine, by rank."""

    results: list[Any]


class EngineFault(msgspec.Struct, omit_defaults=True):
    """One engine: `unhealthy` is there and takes no requests, `dead` is expected and not there."""

    id: int
    status: Literal["healthy", "unhealthy", "dead"]
    fault_info: str | None = None


class FaultStatus(msgspec.Struct):
    """Which engines there are, and which are missing."""

    engines: list[EngineFault]
    total_engines: int
    schema_version: int = 1
