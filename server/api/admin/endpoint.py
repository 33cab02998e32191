"""GET and POST /admin/*: operator endpoints, behind the admin key.

Requests that change the number of engines go to the supervisor and continue after the response.
"""

import msgspec
from fastapi import APIRouter

from engine.shared.messages import (
    ControlQuery,
    ControlRequest,
    ControlStatus,
    EngineEntry,
    RestartEngines,
    ScaleEngines,
    UtilityResult,
)
from server.api.admin import schema
from server.api.route import OperatorRoute
from server.api.services import Services, ServicesDep
from server.control import SupervisorTimeout
from server.errors import invalid, unavailable

router = APIRouter(route_class=OperatorRoute)


@router.get("/admin/engines")
async def list_engines(services: ServicesDep) -> schema.EngineList:
    """List the engines with their state and load."""
    client = services.client
    view = client.view
    if view is None:
        return schema.EngineList([], 0, False, 0)
    ages = client.stats_age
    engines = [_status(entry, ages.get(entry.rank)) for entry in view.engines]
    engines.sort(key=lambda engine: engine.rank)
    return schema.EngineList(engines, view.wave, view.running, view.num_front_ends)


@router.post("/admin/reset-prefix-cache")
async def reset_prefix_cache(
    services: ServicesDep, rank: int | None = None
) -> schema.UtilityAnswers:
    """Clear the prefix cache of one engine, or of all."""
    results = await services.client.call_utility(rank, "reset_prefix_cache", {})
    return _answers(results)


@router.post("/admin/utilities")
async def call_utility(body: schema.UtilityRequest, services: ServicesDep) -> schema.UtilityAnswers:
    """Call a utility of one engine, or of all, by name."""
    results = await services.client.call_utility(body.rank, body.name, body.arguments)
    return _answers(results)


@router.get("/admin/scale")
async def scale_status(services: ServicesDep) -> schema.ScaleStatus:
    """Show the current and target number of engines and the phase of each."""
    return _scale_status(await call_supervisor(services, ControlQuery()))


@router.post("/admin/restart")
async def restart(services: ServicesDep) -> schema.ScaleStatus:
    """Replace the engines one at a time while the rest keep serving."""
    return _scale_status(await call_supervisor(services, RestartEngines()))


@router.post("/admin/scale")
async def scale(body: schema.ScaleRequest, services: ServicesDep) -> schema.ScaleStatus:
    """Set the target number of engines."""
    return _scale_status(await call_supervisor(services, ScaleEngines(body.data_parallel_size)))


def _answers(results: list[UtilityResult]) -> schema.UtilityAnswers:
    if results and all(result.error is not None for result in results):
        raise invalid(f"Every engine failed: {results[0].error}", code="utility_failed")
    answers = [schema.UtilityAnswer(each.rank, each.result, each.error) for each in results]
    return schema.UtilityAnswers(sorted(answers, key=lambda answer: answer.rank))


def _status(entry: EngineEntry, stats_age: float | None) -> schema.EngineStatus:
    stats, setup = entry.stats, entry.setup
    return schema.EngineStatus(
        rank=entry.rank,
        incarnation=entry.incarnation,
        ready=entry.ready,
        host=entry.host,
        restarts=entry.restarts,
        running=stats.running if stats else 0,
        waiting=stats.waiting if stats else 0,
        kv_usage=stats.kv_usage if stats else 0.0,
        queued_prefill_tokens=stats.queued_prefill_tokens if stats else 0,
        stats_age=stats_age,
        num_kv_blocks=setup.num_kv_blocks if setup else None,
        max_num_seqs=setup.max_num_seqs if setup else None,
        halted=stats.halted if stats else False,
        weight_version=stats.weight_version if stats else "",
    )


async def call_supervisor(services: Services, request: ControlRequest) -> ControlStatus:
    """Send a control request to the supervisor and return its response.

    Raises:
        ApiError: there is no supervisor, or it does not respond.
    """
    if services.control is None:
        raise invalid(
            "This API server did not start any engines: send the request to the node that did.",
            code="no_supervisor",
        )
    try:
        return await services.control.call(request)
    except SupervisorTimeout as error:
        raise unavailable(str(error)) from error


def _scale_status(status: ControlStatus) -> schema.ScaleStatus:
    nodes = {
        node.name: schema.NodeScale(node.target, node.capacity, node.phases, node.busy, node.error)
        for node in status.nodes
    }
    return schema.ScaleStatus(**{**msgspec.structs.asdict(status), "nodes": nodes})
