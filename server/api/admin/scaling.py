"""GET and POST /admin/scale, POST /admin/restart: the number of engines, and new ones for old.

The supervisor is asked; changes go on after the answer.
"""

from fastapi import APIRouter, Response

from engine.shared.messages import (
    ControlQuery,
    ControlRequest,
    ControlStatus,
    RestartEngines,
    ScaleEngines,
)
from server.api.admin.schema import NodeScale, ScaleRequest, ScaleStatus
from server.api.openapi import ADMIN_ERRORS, json_responses
from server.api.route import ApiRoute, json_response
from server.api.services import Services, ServicesDep
from server.control import SupervisorSilent
from server.errors import invalid, unavailable

router = APIRouter(route_class=ApiRoute)


@router.get("/admin/scale", responses=json_responses(ScaleStatus, 400, 403, 503))
async def scale_status(services: ServicesDep) -> Response:
    """Show how many engines there are, shall be, and what each is doing."""
    return json_response(_answer(await ask(services, ControlQuery())))


@router.post("/admin/restart", responses=json_responses(ScaleStatus, 400, 403, 503))
async def restart(services: ServicesDep) -> Response:
    """Replace every engine, one after the other, while the others serve."""
    return json_response(_answer(await ask(services, RestartEngines())))


@router.post("/admin/scale", responses=json_responses(ScaleStatus, *ADMIN_ERRORS))
async def scale(body: ScaleRequest, services: ServicesDep) -> Response:
    """Run so many engines from now on."""
    return json_response(_answer(await ask(services, ScaleEngines(body.data_parallel_size))))


async def ask(services: Services, request: ControlRequest) -> ControlStatus:
    """Return what the supervisor answers.

    Raises:
        ApiError: there is none, or it does not answer.
    """
    if services.control is None:
        raise invalid(
            "This API server has no supervisor: scale where its engines were started.",
            code="no_supervisor",
        )
    try:
        return await services.control.ask(request)
    except SupervisorSilent as error:
        raise unavailable(str(error)) from error


def _answer(status: ControlStatus) -> ScaleStatus:
    nodes = {
        node.name: NodeScale(node.target, node.capacity, node.phases, node.busy, node.error)
        for node in status.nodes
    }
    return ScaleStatus(
        status.data_parallel_size,
        status.engines,
        status.busy,
        status.error,
        nodes,
        status.hosts,
        status.waiting,
        status.api_servers,
    )
