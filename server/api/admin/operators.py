"""vLLM's operator endpoints, under their own names and with their defaults.

Without `rank` an order applies to all engines of this server's group, including ones that start
later, and survives restarts of engines and of the coordinator. With `rank` it applies to one engine
process.

Load and unload requests for adapters return once they have taken effect on every front end.
"""

import asyncio
import secrets
import time
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse

from engine.shared.messages import (
    ASLEEP_TAGS,
    AdapterOutcome,
    ControlQuery,
    FleetRequest,
    PauseMode,
    ScaleEngines,
    UtilityResult,
    UtilityValue,
)
from server.api.admin import schema
from server.api.admin.endpoint import call_supervisor
from server.api.openapi import errors, text_responses
from server.api.route import OperatorRoute
from server.api.services import Services, ServicesDep
from server.errors import ApiError, invalid, invalid_field, unavailable
from server.limits import MAX_TOKENS
from server.router.engine_client import UTILITY_TIMEOUT

Rank = Annotated[int | None, Query(ge=0, le=MAX_TOKENS)]
Tag = Literal["weights", "kv_cache", "scheduling"]

_POLL_INTERVAL = 0.2
"""Seconds between polls for completion."""

router = APIRouter(route_class=OperatorRoute)
_CHANGED = text_responses("text/plain; charset=utf-8", "It is done.") | errors(404)


@router.post("/pause")
async def pause(
    services: ServicesDep, mode: PauseMode = "abort", clear_cache: bool = True, rank: Rank = None
) -> schema.PauseStatus:
    """Stop launching steps; `mode` selects what happens to running requests."""
    await _pause(services, mode, rank)
    if clear_cache and mode in ("abort", "wait"):
        await _call(services, rank, "reset_prefix_cache")
    return schema.PauseStatus("paused")


@router.post("/resume")
async def resume(services: ServicesDep, rank: Rank = None) -> schema.PauseStatus:
    """End a pause."""
    if rank is None:
        await _order(services, FleetRequest(_ticket(), "resume"))
    else:
        await _call(services, rank, "resume")
    return schema.PauseStatus("resumed")


@router.get("/is_paused")
async def is_paused(services: ServicesDep) -> schema.IsPaused:
    """Return whether all engines are paused or asleep."""
    infos = await _call(services, None, "info")
    return schema.IsPaused(all(each["is_paused"] or each["is_sleeping"] for each in infos))


@router.post("/sleep")
async def sleep(
    services: ServicesDep,
    level: Annotated[int, Query(ge=0, le=2)] = 1,
    mode: PauseMode = "abort",
    rank: Rank = None,
) -> schema.Done:
    """Release memory: at level 1 the KV cache, at level 2 the weights too, at level 0 nothing."""
    waits = mode == "wait"
    if waits:
        await _pause(services, mode, rank)
        mode = "keep"
    if rank is None:
        await _order(services, FleetRequest(_ticket(), "sleep", mode, level))
    else:
        await _call(services, rank, "sleep", level=level, mode=mode)
    if waits:
        await resume(services, rank)
    return schema.Done(f"The engines sleep at level {level}.")


@router.post("/wake_up")
async def wake_up(
    services: ServicesDep,
    tags: Annotated[list[Tag] | None, Query(max_length=3)] = None,
    rank: Rank = None,
) -> schema.Done:
    """Reallocate memory: all of it, or only what `tags` name, weights first."""
    if rank is None:
        await _order(services, FleetRequest(_ticket(), "wake_up", tags=list(tags or ())))
    else:
        await _call(services, rank, "wake_up", tags=",".join(tags or ASLEEP_TAGS))
    return schema.Done("The engines have what was asked for.")


@router.get("/is_sleeping")
async def is_sleeping(services: ServicesDep) -> schema.IsSleeping:
    """Return whether all engines are asleep."""
    infos = await _call(services, None, "info")
    return schema.IsSleeping(all(each["is_sleeping"] for each in infos))


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(services: ServicesDep, rank: Rank = None) -> schema.Done:
    """Clear the prefix caches of the engines."""
    answers = await _call(services, rank, "reset_prefix_cache")
    blocks = sum(int(each["blocks_forgotten"] or 0) for each in answers)
    return schema.Done(f"{blocks} blocks were forgotten.")


@router.post("/reset_mm_cache")
@router.post("/reset_encoder_cache")
async def reset_encoder_cache(services: ServicesDep, rank: Rank = None) -> schema.Done:
    """Clear the encoder caches of the engines, except for images that are being encoded."""
    answers = await _call(services, rank, "reset_encoder_cache")
    images = sum(int(each["images_forgotten"] or 0) for each in answers)
    return schema.Done(f"{images} images were forgotten.")


@router.post("/start_profile")
async def start_profile(services: ServicesDep, rank: Rank = None) -> schema.Done:
    """Start profiling steps."""
    answers = await _call(services, rank, "start_profile")
    return schema.Done(f"Traces will be in {answers[0]['directory']}.")


@router.post("/stop_profile")
async def stop_profile(services: ServicesDep, rank: Rank = None) -> schema.Done:
    """Stop profiling and write the traces."""
    answers = await _call(services, rank, "stop_profile")
    return schema.Done(", ".join(str(each["trace"]) for each in answers))


@router.post("/scale_elastic_ep")
async def scale(body: schema.ScaleEpRequest, services: ServicesDep) -> schema.Done:
    """Scale to this number of engines; return once they run, or after `drain_timeout`."""
    size, until = body.new_data_parallel_size, time.monotonic() + body.drain_timeout
    status = await call_supervisor(services, ScaleEngines(size))
    while status.busy or status.data_parallel_size != size:
        if status.error is not None:
            raise invalid(status.error, "new_data_parallel_size", code="cannot_scale")
        if time.monotonic() > until:
            raise unavailable(
                f"After {body.drain_timeout} s the change is not complete yet; it continues."
            )
        await asyncio.sleep(_POLL_INTERVAL)
        status = await call_supervisor(services, ControlQuery())
    return schema.Done(f"Scaled to {size} data parallel engines")


@router.post("/is_scaling_elastic_ep")
async def is_scaling(services: ServicesDep) -> schema.IsScaling:
    """Return whether engines are being added, retired or replaced."""
    return schema.IsScaling((await call_supervisor(services, ControlQuery())).busy)


@router.get("/v1/fault_tolerance/status")
async def faults(services: ServicesDep) -> schema.FaultStatus:
    """Report which engines are healthy, unhealthy, or missing."""
    view = services.client.view
    if view is None:
        return schema.FaultStatus([], 0)
    engines = [
        schema.EngineFault(entry.rank, "healthy" if entry.ready else "unhealthy")
        for entry in view.engines
    ]
    for missing in view.missing:
        why = f"{missing.reason.replace('_', ' ')}, for {missing.age:.0f} s"
        engines.append(schema.EngineFault(missing.rank, "dead", why))
    engines.sort(key=lambda engine: engine.id)
    return schema.FaultStatus(engines, len(engines))


@router.post("/collective_rpc")
async def collective_rpc(body: schema.RpcRequest, services: ServicesDep) -> schema.RpcResults:
    """Call a worker extension method in one engine, or in all."""
    arguments: dict[str, UtilityValue] = {
        "method": body.method,
        "args": msgspec.json.encode(body.args).decode(),
        "kwargs": msgspec.json.encode(body.kwargs).decode(),
    }
    answers = await services.client.call_utility(body.rank, "collective_rpc", arguments)
    results = [_result(each)["result"] for each in answers]
    return schema.RpcResults([msgspec.json.decode(str(each)) for each in results])


@router.post("/v1/load_lora_adapter", responses=_CHANGED)
async def load_lora_adapter(body: schema.LoadLoraRequest, services: ServicesDep) -> Response:
    """Load an adapter in all engines; after that requests can name it as their model."""
    name = body.lora_name
    if name in services.names:
        raise invalid_field("lora_name", f"{name!r} is the name of the model itself")
    if body.base_model_name is not None and body.base_model_name not in services.names:
        raise invalid_field("base_model_name", f"the served model is {services.names[0]!r}")
    if "\0" in body.lora_path:
        raise invalid_field("lora_path", "must not contain a NUL byte")
    outcome = await services.client.change_adapter(name, body.lora_path, body.load_inplace)
    return _changed(outcome, f"Success: LoRA adapter '{name}' added successfully.", "lora_path")


@router.post("/v1/unload_lora_adapter", responses=_CHANGED)
async def unload_lora_adapter(body: schema.UnloadLoraRequest, services: ServicesDep) -> Response:
    """Stop accepting requests for an adapter; running ones finish with it."""
    name = body.lora_name
    outcome = await services.client.change_adapter(name)
    return _changed(outcome, f"Success: LoRA adapter '{name}' removed successfully.", "lora_name")


def _changed(outcome: AdapterOutcome, success: str, param: str) -> Response:
    status = outcome.status
    if status != 200:
        code = {404: "adapter_not_found", 503: "unavailable"}.get(status, "bad_adapter")
        kind = "server_error" if status >= 500 else "invalid_request_error"
        raise ApiError(status, outcome.reason, param=param, code=code, kind=kind)
    return PlainTextResponse(success)


async def _pause(services: Services, mode: PauseMode, rank: int | None) -> None:
    if rank is None:
        await _order(services, FleetRequest(_ticket(), "pause", mode))
        return
    await _call(services, rank, "pause", mode=mode)
    until = time.monotonic() + UTILITY_TIMEOUT
    while True:
        [info] = await _call(services, rank, "info")
        if info["is_paused"]:
            return
        if time.monotonic() > until:
            raise unavailable(
                f"After {UTILITY_TIMEOUT:g} s engine {rank} still runs requests; it takes "
                "nothing new."
            )
        await asyncio.sleep(_POLL_INTERVAL)


async def _order(services: Services, request: FleetRequest) -> None:
    for answer in await services.client.order_fleet(request):
        if isinstance(answer.result, dict) and (error := answer.result["fleet_error"]):
            raise invalid(f"Engine {answer.rank}: {error}.", code="utility_failed")


async def _call(
    services: Services, rank: int | None, name: str, **arguments: UtilityValue
) -> list[dict[str, UtilityValue]]:
    return [_result(each) for each in await services.client.call_utility(rank, name, arguments)]


def _result(answer: UtilityResult) -> dict[str, UtilityValue]:
    if answer.error is not None or not isinstance(answer.result, dict):
        raise invalid(f"Engine {answer.rank}: {answer.error}", code="utility_failed")
    return answer.result


def _ticket() -> int:
    return secrets.randbits(60)
