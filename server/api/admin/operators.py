"""vLLM's paths for operators, under their own names and with their defaults.

Without `rank` an order is for all engines of this server's group, those that are still to come
included, and outlives restarts of engines and of the coordinator. With `rank` it is for one engine
process.
"""

import asyncio
import secrets
import time
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Response

from engine.shared.messages import (
    ASLEEP_TAGS,
    ControlQuery,
    FleetWish,
    PauseMode,
    ScaleEngines,
    UtilityResult,
    UtilityValue,
)
from server.api.admin.endpoint import ask
from server.api.admin.schema import (
    Done,
    EngineFault,
    FaultStatus,
    IsPaused,
    IsScaling,
    IsSleeping,
    PauseStatus,
    RpcRequest,
    RpcResults,
    ScaleEpRequest,
)
from server.api.openapi import ADMIN_ERRORS, json_responses
from server.api.route import ApiRoute, json_response
from server.api.services import Services, ServicesDep
from server.errors import invalid, unavailable
from server.limits import MAX_TOKENS
from server.router.engine_client import UTILITY_TIMEOUT

Rank = Annotated[int | None, Query(ge=0, le=MAX_TOKENS)]
Tag = Literal["weights", "kv_cache", "scheduling"]

_LOOK_INTERVAL = 0.2
"""Seconds between two looks at whether it is done."""
_ERRORS = (400, 403, 500, 503)

router = APIRouter(route_class=ApiRoute)
_PAUSED, _DONE = json_responses(PauseStatus, *_ERRORS), json_responses(Done, *_ERRORS)


@router.post("/pause", responses=_PAUSED)
async def pause(
    services: ServicesDep, mode: PauseMode = "abort", clear_cache: bool = True, rank: Rank = None
) -> Response:
    """Launch no further step; `mode` says what happens to requests."""
    await _pause(services, mode, rank)
    if clear_cache and mode in ("abort", "wait"):
        await _call(services, rank, "reset_prefix_cache")
    return json_response(PauseStatus("paused"))


@router.post("/resume", responses=_PAUSED)
async def resume(services: ServicesDep, rank: Rank = None) -> Response:
    """End a pause."""
    if rank is None:
        await _order(services, FleetWish(_ticket(), "resume"))
    else:
        await _call(services, rank, "resume")
    return json_response(PauseStatus("resumed"))


@router.get("/is_paused", responses=json_responses(IsPaused, *_ERRORS))
async def is_paused(services: ServicesDep) -> Response:
    """Say whether all engines are paused or asleep."""
    infos = await _call(services, None, "info")
    return json_response(IsPaused(all(each["is_paused"] or each["is_sleeping"] for each in infos)))


@router.post("/sleep", responses=_DONE)
async def sleep(
    services: ServicesDep,
    level: Annotated[int, Query(ge=0, le=2)] = 1,
    mode: PauseMode = "abort",
    rank: Rank = None,
) -> Response:
    """Give memory back: at level 1 the KV cache, at 2 the weights too, at 0 nothing."""
    if mode == "wait":
        await _pause(services, "wait", rank)
        mode = "keep"
        waited = True
    else:
        waited = False
    if rank is None:
        await _order(services, FleetWish(_ticket(), "sleep", mode, level))
    else:
        await _call(services, rank, "sleep", level=level, mode=mode)
    if waited:
        await resume(services, rank)
    return json_response(Done(f"The engines sleep at level {level}."))


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
    return json_response(Done("The engines have what was asked for."))


@router.get("/is_sleeping", responses=json_responses(IsSleeping, *_ERRORS))
async def is_sleeping(services: ServicesDep) -> Response:
    """Say whether all engines are asleep."""
    infos = await _call(services, None, "info")
    return json_response(IsSleeping(all(each["is_sleeping"] for each in infos)))


@router.post("/reset_prefix_cache", responses=_DONE)
async def reset_prefix_cache(services: ServicesDep, rank: Rank = None) -> Response:
    """Forget the prompts that engines have computed."""
    answers = await _call(services, rank, "reset_prefix_cache")
    blocks = sum(int(each["blocks_forgotten"] or 0) for each in answers)
    return json_response(Done(f"{blocks} blocks were forgotten."))


@router.post("/reset_mm_cache", responses=_DONE)
@router.post("/reset_encoder_cache", responses=_DONE)
async def reset_encoder_cache(services: ServicesDep, rank: Rank = None) -> Response:
    """Forget what engines have encoded of images, but for those that are being computed."""
    answers = await _call(services, rank, "reset_encoder_cache")
    images = sum(int(each["images_forgotten"] or 0) for each in answers)
    return json_response(Done(f"{images} images were forgotten."))


@router.post("/start_profile", responses=_DONE)
async def start_profile(services: ServicesDep, rank: Rank = None) -> Response:
    """Begin to record what steps do."""
    answers = await _call(services, rank, "start_profile")
    return json_response(Done(f"Traces will be in {answers[0]['directory']}."))


@router.post("/stop_profile", responses=_DONE)
async def stop_profile(services: ServicesDep, rank: Rank = None) -> Response:
    """End the recordings and write their traces."""
    answers = await _call(services, rank, "stop_profile")
    return json_response(Done(", ".join(str(each["trace"]) for each in answers)))


@router.post("/scale_elastic_ep", responses=json_responses(Done, *ADMIN_ERRORS))
async def scale(body: ScaleEpRequest, services: ServicesDep) -> Response:
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
    return json_response(Done(f"Scaled to {size} data parallel engines"))


@router.post("/is_scaling_elastic_ep", responses=json_responses(IsScaling, 400, 403, 503))
async def is_scaling(services: ServicesDep) -> Response:
    """Say whether engines are being added, retired or replaced."""
    return json_response(IsScaling((await ask(services, ControlQuery())).busy))


@router.get("/v1/fault_tolerance/status", responses=json_responses(FaultStatus, 403))
async def faults(services: ServicesDep) -> Response:
    """Say which engines serve, which do not yet or not any more, and which are missing."""
    view = services.client.view
    if view is None:
        return json_response(FaultStatus([], 0))
    engines = [
        EngineFault(entry.rank, "healthy" if entry.ready else "unhealthy") for entry in view.engines
    ]
    for missing in view.missing:
        why = f"{missing.reason.replace('_', ' ')}, for {missing.age:.0f} s"
        engines.append(EngineFault(missing.rank, "dead", why))
    engines.sort(key=lambda engine: engine.id)
    return json_response(FaultStatus(engines, len(engines)))


@router.post("/collective_rpc", responses=json_responses(RpcResults, *ADMIN_ERRORS))
async def collective_rpc(body: RpcRequest, services: ServicesDep) -> Response:
    """Call a method of a worker extension in one engine, or in all."""
    arguments: dict[str, UtilityValue] = {
        "method": body.method,
        "args": msgspec.json.encode(body.args).decode(),
        "kwargs": msgspec.json.encode(body.kwargs).decode(),
    }
    answers = await services.client.call_utility(body.rank, "collective_rpc", arguments)
    results = [_result(each)["result"] for each in answers]
    return json_response(RpcResults([msgspec.json.decode(str(each)) for each in results]))


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
    """Have all engines do it."""
    for answer in await services.client.order_fleet(wish):
        if isinstance(answer.result, dict) and (error := answer.result["fleet_error"]):
            raise invalid(f"Engine {answer.rank}: {error}.", code="utility_failed")


async def _call(
    services: Services, rank: int | None, name: str, **arguments: UtilityValue
) -> list[dict[str, UtilityValue]]:
    """Return what one engine answered, or all."""
    return [_result(each) for each in await services.client.call_utility(rank, name, arguments)]


def _result(answer: UtilityResult) -> dict[str, UtilityValue]:
    """Return what an engine answered."""
    if answer.error is not None or not isinstance(answer.result, dict):
        raise invalid(f"Engine {answer.rank}: {answer.error}", code="utility_failed")
    return answer.result


def _ticket() -> int:
    return secrets.randbits(60)
