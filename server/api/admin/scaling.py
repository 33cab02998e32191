"""GET and POST /admin/scale, POST /admin/restart: the number of engines, and new ones for old."""

import msgspec
from fastapi import Response

from engine.shared.messages import (
    ControlQuery,
    ControlRequest,
    ControlStatus,
    RestartEngines,
    ScaleEngines,
)
from server.api.admin.schema import NodeScale, ScaleRequest, ScaleStatus
from server.api.body import read_body
from server.api.context import Context
from server.fleet.control import SupervisorControl, SupervisorSilent
from server.http.call import Call
from server.http.errors import invalid, unavailable


class ScalingRoutes:
    """Endpoints that hand wishes to the supervisor; changes go on after the answer."""

    def __init__(self, control: SupervisorControl | None) -> None:
        self._control = control

    async def status(self) -> Response:
        """Show how many engines there are, shall be, and what each is doing."""
        return _json(await self._ask(ControlQuery()))

    async def restart(self) -> Response:
        """Replace every engine, one after the other, while the others serve."""
        return _json(await self._ask(RestartEngines()))

    async def scale(self, call: Call, _context: Context) -> None:
        """Run so many engines from now on."""
        request = read_body(ScaleRequest, call.body)
        await call.send_struct(_answer(await self._ask(ScaleEngines(request.data_parallel_size))))

    async def _ask(self, request: ControlRequest) -> ControlStatus:
        if self._control is None:
            raise invalid(
                "This API server has no supervisor: scale with what started its engines.",
                code="no_supervisor",
            )
        try:
            return await self._control.ask(request)
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


def _json(status: ControlStatus) -> Response:
    return Response(msgspec.json.encode(_answer(status)), media_type="application/json")
