"""vLLM's paths for operators, under their own names and with their defaults.

Without `rank` an order is for all engines of this server's group, those that are still to come
included, and outlives restarts of engines and of the coordinator. With `rank` it is for one engine
process.

Adapters are loaded and unloaded when the answer comes: one that is loaded can be named at every
front end at once, and one that was unloaded at none.
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
    FleetWish,
    PauseMode,
    ScaleEngines,
    UtilityResult,
    UtilityValue,
)
from server.api.admin import schema
from server.api.admin.endpoint import ask
from server.api.openapi import ADMIN_ERRORS, json_responses, text_responses
from server.api.route import ApiRoute, json_response
from server.api.services import Services, ServicesDep
from server.errors import ApiError, invalid, invalid_field, unavailable
from server.limits import MAX_TOKENS
from server.router.engine_client import UTILITY_TIMEOUT

Rank = Annotated[int | None, Query(ge=0, le=MAX_TOKENS)]
Tag = Literal["weights", "kv_cache", "scheduling"]

_LOOK_INTERVAL = 0.2
"""Seconds between two looks at whether it is done."""
_ERRORS = (400, 403, 500, 503)

router = APIRouter(route_class=ApiRoute)
_PAUSED, _DONE = json_responses(schema.PauseStatus, *_ERRORS), json_responses(schema.Done, *_ERRORS)
_CHANGED = text_responses(
    400, 403, 404, 413, 415, 503, kind="text/plain; charset=utf-8", text="It is done."
)


@router.post("/pause", responses=_PAUSED)
async def pause(
    services: ServicesDep, mode: PauseMode = "abort", clear_cache: bool = True, rank: Rank = None
) -> Response:
    """Launch no further step; `mode` says what happens to requests."""
    await _pause(services, mode, rank)
    if clear_cache and mode in ("abort", "wait"):
        await _call(services, rank, "reset_prefix_cache")
    return json_response(schema.PauseStatus("paused"))


@router.post("/resume", responses=_PAUSED)
async def resume(services: ServicesDep, rank: Rank = None) -> Response:
    """End a pause."""
    if rank is None:
        await _order(services, FleetWish(_ticket(), "resume"))
    else:
        await _call(services, rank, "resume")
    return json_response(schema.PauseStatus("resumed"))


@router.get("/is_paused", responses=json_responses(schema.IsPaused, *_ERRORS))
async def is_paused(services: ServicesDep) -> Response:
    """Say whether all engines are paused or asleep."""
    infos = await _call(services, None, "info")
    return json_response(
        schema.IsPaused(all(each["is_paused"] or each["is_sleeping"] for each in infos))
    )


@router.post("/sleep", responses=_DONE)
async def sleep(
    services: ServicesDep,
    level: Annotated[int, Query(ge=0, le=2)] = 1,
    mode: PauseMode = "abort",
    rank: Rank = None,
) -> Response:
    """Give memory back: at level 1 the KV cache, at 2 the weights too, at 0 nothing."""
    waits = mode == "wait"
    if waits:
        await _pause(services, mode, rank)
        mode = "keep"
    if rank is None:
        await _order(services, FleetWish(_ticket(), "sleep", mode, level))
    else:
        await _call(services, rank, "sleep", level=level, mode=mode)
    if waits:
        await resume(services, rank)
    return json_response(schema.Done(f"The engines sleep at level {level}."))


@router.post("/wake_up", responses=_DONE)
async def wake_up(
    services: ServicesDep,
    tags: Annotated[list[Tag] | None, Query(max_length=3)] = None,
    rank: Rank = None,
) -> Response:
    """Have memory back: all of it, or what `tags` name, weights first."""
    if rank is None:
        await _order(services, FleetWish(_ticket(), "wake_up", tags=list(tags or ())))
    else:
        await _call(services, rank, "wake_up", tags=",".join(tags or ASLEEP_TAGS))
    return json_response(schema.Done("The engines have what was asked for."))


@router.get("/is_sleeping", responses=json_responses(schema.IsSleeping, *_ERRORS))
async def is_sleeping(services: ServicesDep) -> Response:
    """Say whether all engines are asleep."""
    infos = await _call(services, None, "info")
    return json_response(schema.IsSleeping(all(each["is_sleeping"] for each in infos)))


@router.post("/reset_prefix_cache", responses=_DONE)
async def reset_prefix_cache(services: ServicesDep, rank: Rank = None) -> Response:
    """Forget the prompts that engines have computed."""
    answers = await _call(services, rank, "reset_prefix_cache")
    blocks = sum(int(each["blocks_forgotten"] or 0) for each in answers)
    return json_response(schema.Done(f"{blocks} blocks were forgotten."))


@router.post("/reset_mm_cache", responses=_DONE)
@router.post("/reset_encoder_cache", responses=_DONE)
async def reset_encoder_cache(services: ServicesDep, rank: Rank = None) -> Response:
    """Forget what engines have encoded of images, but for those that are being computed."""
    answers = await _call(services, rank, "reset_encoder_cache")
    images = sum(int(each["images_forgotten"] or 0) for each in answers)
    return json_response(schema.Done(f"{images} images were forgotten."))


@router.post("/start_profile", responses=_DONE)
async def start_profile(services: ServicesDep, rank: Rank = None) -> Response:
    """Begin to record what steps do."""
    answers = await _call(services, rank, "start_profile")
    return json_response(schema.Done(f"Traces will be in {answers[0]['directory']}."))


@router.post("/stop_profile", responses=_DONE)
async def stop_profile(services: ServicesDep, rank: Rank = None) -> Response:
    """End the recordings and write their traces."""
    answers = await _call(services, rank, "stop_profile")
    return json_response(schema.Done(", ".join(str(each["trace"]) for each in answers)))


@router.post("/scale_elastic_ep", responses=json_responses(schema.Done, *ADMIN_ERRORS))
async def scale(body: schema.ScaleEpRequest, services: ServicesDep) -> Response:
    """Run this number of engines; answer when they run, or after `drain_timeout`."""
    size, until = body.new_data_parallel_size, time.monotonic() + body.drain_timeout
    status = await ask(services, ScaleEngines(size))
    while status.busy or status.data_parallel_size != size:
        if status.error is not None:
            raise invalid(status.error, "new_data_parallel_size", code="cannot_scale")
        if time.monotonic() > until:
            raise unavailable(
                f"After {body.drain_timeout} s the change is not complete yet; it continues."
            )
        await asyncio.sleep(_LOOK_INTERVAL)
        status = await ask(services, ControlQuery())
    return json_response(schema.Done(f"Scaled to {size} data parallel engines"))


@router.post("/is_scaling_elastic_ep", responses=json_responses(schema.IsScaling, 400, 403, 503))
async def is_scaling(services: ServicesDep) -> Response:
    """Say whether engines are being added, retired or replaced."""
    return json_response(schema.IsScaling((await ask(services, ControlQuery())).busy))


@router.get("/v1/fault_tolerance/status", responses=json_responses(schema.FaultStatus, 403))
async def faults(services: ServicesDep) -> Response:
    """Say which engines serve, which do not yet or not any more, and which are missing."""
    view = services.client.view
    if view is None:
        return json_response(schema.FaultStatus([], 0))
    engines = [
        schema.EngineFault(entry.rank, "healthy" if entry.ready else "unhealthy")
        for entry in view.engines
    ]
    for missing in view.missing:
        why = f"{missing.reason.replace('_', ' ')}, for {missing.age:.0f} s"
        engines.append(schema.EngineFault(missing.rank, "dead", why))
    engines.sort(key=lambda engine: engine.id)
    return json_response(schema.FaultStatus(engines, len(engines)))


@router.post("/collective_rpc", responses=json_responses(schema.RpcResults, *ADMIN_ERRORS))
async def collective_rpc(body: schema.RpcRequest, services: ServicesDep) -> Response:
    """Call a method of a worker extension in one engine, or in all."""
    arguments: dict[str, UtilityValue] = {
        "method": body.method,
        "args": msgspec.json.encode(body.args).decode(),
        "kwargs": msgspec.json.encode(body.kwargs).decode(),
    }
    answers = await services.client.call_utility(body.rank, "collective_rpc", arguments)
    results = [_result(each)["result"] for each in answers]
    return json_response(schema.RpcResults([msgspec.json.decode(str(each)) for each in results]))


@router.post("/v1/load_lora_adapter", responses=_CHANGED)
async def load_lora_adapter(body: schema.LoadLoraRequest, services: ServicesDep) -> Response:
    """Have all engines load an adapter; then requests may name it as their model."""
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
    """Stop taking requests for an adapter; those that run end with it."""
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
        await _order(services, FleetWish(_ticket(), "pause", mode))
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
        await asyncio.sleep(_LOOK_INTERVAL)


async def _order(services: Services, wish: FleetWish) -> None:
    for answer in await services.client.order_fleet(wish):
        if isinstance(answer.result, dict) and (error := answer.result["fleet_error"]):
            raise invalid(f"Engine {answer.rank}: {error}.", code="utility_failed")


async def _call(
    services: Services, rank: int | None, name: str, **arguments: UtilityValue
) -> list[dict[str, UtilityValue]]:
    return [_result(each) for each in await services.client.call_utility(rank, name, arguments)]


def _result(answer: UtilityResult) -> dict[str, UtilityValue]:
    """Return what an engine answered."""
    if answer.error is not None or not isinstance(answer.result, dict):
        raise invalid(f"Engine {answer.rank}: {answer.error}", code="utility_failed")
    return answer.result


def _ticket() -> int:
    return secrets.randbits(60)
