"""Fills the place of an API server on another node of a Ray cluster."""

import asyncio
from collections.abc import Callable

import msgspec

from engine.shared.config import BUNDLED_MODEL
from engine.shared.messages import ChildProgress, ChildStatus
from server.config import FrontEndConfig
from server.fleet.holder import Program
from server.fleet.ray.cluster import RemoteActor
from server.fleet.ray.messages import ActorLaunch, ApiServerLaunch
from server.fleet.ray.starter import LOOK_INTERVAL, Ranks, RayHolder
from server.fleet.role import Role


class ApiServerHolder(RayHolder):
    """One API server on a certain node: a `Holder`. It takes no room from engines."""

    def __init__(
        self,
        ranks: Ranks,
        program: Program,
        on_status: Callable[[ChildStatus], None],
        on_line: Callable[[str], None],
        wanted: str,
    ) -> None:
        self._wanted = wanted
        self._wanted_id = ""
        self._is_ending = False
        super().__init__(ranks, program, on_status, on_line)

    def terminate(self) -> None:
        """Ask it to drain and end, once: a second request would end it at once."""
        if not self._is_ending or not self._has_engine:
            super().terminate()
        self._is_ending = True

    async def _find_room(self) -> None:
        """Wait until the node is there, maybe again."""
        while True:
            nodes = await self._ranks.cluster.nodes()
            self._wanted_id = next((node.id for node in nodes if node.name == self._wanted), "")
            if self._wanted_id:
                self.node = self._wanted
                return
            self._on_status(ChildProgress("waiting for its node"))
            await asyncio.sleep(LOOK_INTERVAL)

    def _start_actor(self) -> RemoteActor:
        name = f"swell {self.name} {self._program.launch.incarnation:x}"
        return self._ranks.cluster.start_actor_on(name, self._wanted_id)

    def _order(self) -> ActorLaunch | ApiServerLaunch:
        order = self._program.launch
        assert isinstance(order, ApiServerLaunch)
        return order


def api_server_role(ranks: Ranks, config: FrontEndConfig, node: str, port: int) -> Role:
    """Return the place of an API server on a node, by the node's name, which is its address."""
    name = f"api on {node}"
    http = msgspec.structs.replace(config.http, host=node, port=port)
    on_node = msgspec.structs.replace(config, http=http)

    async def start(
        program: Program,
        *,
        on_status: Callable[[ChildStatus], None],
        on_line: Callable[[str], None],
    ) -> ApiServerHolder:
        return ApiServerHolder(ranks, program, on_status, on_line, node)

    return Role(
        name=name,
        module="server",
        launch=lambda incarnation: ApiServerLaunch(
            name,
            on_node,
            incarnation,
            ranks.environment,
            ranks.cluster_key,
            str(BUNDLED_MODEL),
        ),
        member=("front_end", -1),
        start=start,
    )
