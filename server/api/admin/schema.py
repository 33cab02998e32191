"""GET and POST /admin/*, and the paths that load adapters: requests and answers."""

import sys
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from engine.shared.config import MAX_NAME_SIZE
from engine.shared.messages import UtilityValue
from server.limits import INT64_MAX, INT64_MIN, MAX_TOKENS
from server.schema.body import Name, RequestBody

MAX_PATH_SIZE = 4096


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
    halted: bool = False
    """Paused or asleep by an operator's order: nothing new is routed to it."""
    weight_version: str = ""
    """What its weights are called; empty for those of the settings."""


class EngineList(msgspec.Struct):
    """All engines, by rank, and the state that they share."""

    engines: list[EngineStatus]
    wave: int
    running: bool
    num_front_ends: int


_Integer = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
_Number = Annotated[float, Field(ge=-sys.float_info.max, le=sys.float_info.max)]


class UtilityRequest(RequestBody):
    """A utility of the engines, by name."""

    name: str = Field(min_length=1, max_length=100)
    arguments: dict[str, str | _Integer | _Number | bool | None] = Field(default_factory=dict)
    rank: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="The engine to ask; default: all."
    )


class UtilityAnswer(msgspec.Struct):
    """What one engine answered."""

    rank: int
    result: UtilityValue | dict[str, UtilityValue]
    error: str | None


class UtilityAnswers(msgspec.Struct):
    """What the engines answered, by rank."""

    answers: list[UtilityAnswer]


class ScaleRequest(RequestBody):
    """How many engines there shall be: on the node, or on all nodes that can join each other."""

    data_parallel_size: int = Field(ge=1, le=1024)


class NodeScale(msgspec.Struct):
    """The engines of one node."""

    data_parallel_size: int
    """How many there shall be."""
    capacity: int
    """How many there can be."""
    engines: dict[str, str]
    """Phase of each by its number on the node."""
    busy: bool
    error: str | None


class ScaleStatus(msgspec.Struct):
    """The engines as the node's supervisor sees them."""

    data_parallel_size: int
    """How many engines there shall be."""
    engines: dict[str, str]
    """Phase of each engine: "ready", "retiring", or what it does while it starts.

    By rank, or, where other nodes can join, as NODE/NUMBER of all nodes.
    """
    busy: bool
    """Whether engines are being added, retired or replaced."""
    error: str | None
    """Why the last change was not carried out."""
    nodes: dict[str, NodeScale] = {}
    """Each node by name; empty where no other can join."""
    hosts: dict[str, str] = {}
    """The node of each engine that runs on another than the supervisor's; keys as in `engines`."""
    waiting: dict[str, str] = {}
    """The resources that a cluster lacks for an engine, e.g. `CPU, GPU`; keys as in `engines`."""
    api_servers: dict[str, str] = {}
    """Phase of each API server by name, where the supervisor has them on several nodes."""


class WeightsRequest(RequestBody):
    """Weights that all engines shall compute with."""

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
    """All engines compute with these weights."""

    weight_version: str
    engines: list[int]
    seconds: float


class LoadLoraRequest(RequestBody):
    """An adapter to serve beside the model."""

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
    """An adapter that shall not be served any more."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_SIZE)
