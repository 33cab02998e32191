"""Requests and responses of the operator endpoints, Swell's and vLLM's."""

import sys
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from engine.shared.config import MAX_NAME_SIZE
from engine.shared.messages import UtilityValue
from server.limits import INT64_MAX, INT64_MIN, MAX_TOKENS
from server.schema.body import Count, Name, RequestBody, Tokens

MAX_PATH_SIZE = 4096
MAX_RPC_TIMEOUT = 600


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
    """Fraction of KV blocks in use, 0 to 1."""
    queued_prefill_tokens: int
    stats_age: float | None
    """Age of the newest stats in seconds; null before the first."""
    num_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    halted: bool = False
    """Paused or asleep by an operator's order: no new requests are routed to it."""
    weight_version: str = ""
    """Version of its weights; empty for those from the settings."""


class EngineList(msgspec.Struct):
    """All engines, by rank, and their shared state."""

    engines: list[EngineStatus]
    wave: int
    running: bool
    num_front_ends: int


_Integer = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
_Number = Annotated[float, Field(ge=-sys.float_info.max, le=sys.float_info.max)]


class UtilityRequest(RequestBody):
    """A call of an engine utility, by name."""

    name: str = Field(min_length=1, max_length=100)
    arguments: dict[str, str | _Integer | _Number | bool | None] = Field(default_factory=dict)
    rank: Count | None = Field(None, description="The engine to ask; default: all.")


class UtilityAnswer(msgspec.Struct):
    """The result from one engine."""

    rank: int
    result: UtilityValue | dict[str, UtilityValue]
    error: str | None


class UtilityAnswers(msgspec.Struct):
    """Results of the engines, by rank."""

    answers: list[UtilityAnswer]


class ScaleRequest(RequestBody):
    """Target number of engines: on this node, or in total over all joined nodes."""

    data_parallel_size: int = Field(ge=1, le=1024)


class NodeScale(msgspec.Struct):
    """The engines of one node."""

    data_parallel_size: int
    """Target number of engines."""
    capacity: int
    """Maximum number of engines."""
    engines: dict[str, str]
    """Phase of each engine by its number on the node."""
    busy: bool
    error: str | None


class ScaleStatus(msgspec.Struct):
    """State of the engines as seen by the node's supervisor."""

    data_parallel_size: int
    """Target number of engines."""
    engines: dict[str, str]
    """Phase of each engine: "ready", "retiring", or its current startup phase.

    Keys are ranks, or NODE/NUMBER for the engines of all nodes if other nodes can join.
    """
    busy: bool
    """Whether engines are being added, retired or replaced."""
    error: str | None
    """Why the last change failed."""
    nodes: dict[str, NodeScale] = {}
    """Each node by name; empty if no other node can join."""
    hosts: dict[str, str] = {}
    """Node of each engine that is not on the supervisor's node; keys as in `engines`."""
    waiting: dict[str, str] = {}
    """Resources that the cluster lacks for an engine, e.g. `CPU, GPU`; keys as in `engines`."""
    api_servers: dict[str, str] = {}
    """Phase of each API server by name, if the supervisor runs them on several nodes."""


class WeightsRequest(RequestBody):
    """Weights for all engines to load."""

    model: str = Field(
        min_length=1, max_length=1000, description="Directory below --weights-dir, or a hub id."
    )
    revision: str | None = Field(None, max_length=200)
    weight_version: str | None = Field(
        None,
        max_length=100,
        pattern=r"^[\x21-\x7e]*$",
        description="What they are called; default: model and revision.",
    )
    mode: Literal["rolling", "in_place"] = Field(
        "rolling",
        description="rolling: one engine after the other, whose requests go to the others; "
        "in_place: all engines between two steps, requests go on with the new weights.",
    )


class WeightsStatus(msgspec.Struct):
    """The weights that all engines now use."""

    weight_version: str
    engines: list[int]
    seconds: float


WeightVersion = Annotated[
    str | None,
    Field(
        max_length=100,
        pattern=r"^[\x21-\x7e]*$",
        description="What the weights are called; default: a number that grows.",
    ),
]


class InitInfo(RequestBody):
    """Address of the trainer's rendezvous."""

    master_address: str = Field(min_length=1, max_length=255)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: Tokens = Field(1, description="Rank of the first engine.")
    world_size: int = Field(
        ge=2, le=MAX_TOKENS, description="The trainer, and what `/get_world_size` says."
    )
    timeout: float = Field(
        60.0, gt=0, le=3600, description="Seconds that all wait to meet, and for each tensor."
    )


class InitTransferRequest(RequestBody):
    """Request to join a trainer that will send weights."""

    init_info: InitInfo


class UpdateInfo(RequestBody):
    """The tensors to be broadcast, in order, named and shaped as in the model's checkpoint."""

    names: list[Name] = Field(min_length=1)
    dtype_names: list[Name] = Field(description="Such as `bfloat16`.")
    shapes: list[list[Annotated[int, Field(ge=1, le=INT64_MAX)]]]
    packed: bool = Field(False, description="Refused if true: several tensors in one broadcast.")


class UpdateWeightsRequest(RequestBody):
    """Weights, or a part of them, that the trainer is about to broadcast."""

    update_info: UpdateInfo
    weight_version: WeightVersion = None


class FinishUpdateRequest(RequestBody):
    """End of a weight update: all parts have been sent."""

    weight_version: WeightVersion = None


class WorldSize(msgspec.Struct):
    """Number of processes that join a trainer."""

    world_size: int


class LoadLoraRequest(RequestBody):
    """An adapter to load and serve."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_SIZE)
    lora_path: str = Field(
        min_length=1,
        max_length=MAX_PATH_SIZE,
        description="Directory as PEFT writes it, on the engines' nodes, below --lora-dir.",
    )
    load_inplace: bool = Field(
        False, description="Replace an adapter of the same name; requests that run keep theirs."
    )
    base_model_name: Name | None = Field(None, description="Refuse if another model is served.")


class UnloadLoraRequest(RequestBody):
    """An adapter to unload."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_SIZE)


class PauseStatus(msgspec.Struct):
    """Confirmation of a pause or resume."""

    status: Literal["paused", "resumed"]


class IsPaused(msgspec.Struct):
    """Whether every engine is paused or asleep."""

    is_paused: bool


class IsSleeping(msgspec.Struct):
    """Whether every engine is asleep."""

    is_sleeping: bool


class Done(msgspec.Struct):
    """Confirmation message."""

    message: str


class ScaleEpRequest(RequestBody):
    """Target number of engines."""

    new_data_parallel_size: int = Field(ge=1, le=1024)
    drain_timeout: int = Field(
        120, ge=1, le=3600, description="Seconds after which the answer comes in any case."
    )


class IsScaling(msgspec.Struct):
    """Whether engines are being added, retired or replaced."""

    is_scaling_elastic_ep: bool


class RpcRequest(RequestBody):
    """A call of a worker extension method, see docs/operators.md."""

    method: str = Field(min_length=1, max_length=200)
    args: list[Any] = Field(default_factory=list, max_length=100)
    kwargs: dict[str, Any] = Field(default_factory=dict, max_length=100)
    timeout: float | None = Field(None, gt=0, le=MAX_RPC_TIMEOUT)
    rank: Count | None = Field(None, description="The engine to ask; default: all.")


class RpcResults(msgspec.Struct):
    """Return values of the method, by engine rank."""

    results: list[Any]


class EngineFault(msgspec.Struct, omit_defaults=True):
    """One engine: `unhealthy` is registered but not ready, `dead` is expected but missing."""

    id: int
    status: Literal["healthy", "unhealthy", "dead"]
    fault_info: str | None = None


class FaultStatus(msgspec.Struct):
    """The registered engines and the missing ones."""

    engines: list[EngineFault]
    total_engines: int
    schema_version: int = 1
