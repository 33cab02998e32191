"""Fills the place of an API server on another node of a Ray cluster."""

import asyncio
from collections.abc import Callable

import msgspec

from engine.shared.config import BUNDLED_MODEL
from engine.shared.messages import ChildProgress, ChildStatus
from server.config import FrontEndConfig
from server.fleet.holder import Program
from server.fleet.ray.cluster import RayCluster, RemoteActor
from server.fleet.ray.holder import LOOK_INTERVAL, Mission, RayHolder
from server.fleet.ray.messages import ApiServerLaunch
from server.fleet.ray.starter import Ranks
from server.fleet.role import Role


class NodeRoom:
    """A certain node, of which an API server takes nothing that engines count on: a `Room`."""

    def __init__(self, cluster: RayCluster, wanted: str) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._node_id = ""

    async def find(self, tell: Callable[[ChildProgress], None]) -> str:
        """Wait until the node is there, maybe again."""
        while True:
            nodes = await self._cluster.nodes()
            self._node_id = next((node.id for node in nodes if node.name == self._wanted), "")
            if self._node_id:
                return self._wanted
            tell(ChildProgress("waiting for its node"))
            await asyncio.sleep(LOOK_INTERVAL)

    def start_actor(self, name: str) -> RemoteActor:
        """Start an actor there."""
        return self._cluster.start_actor_on(name, self._node_id)

    def lost_node(self) -> None:
        """Do nothing: no other node will do."""

    async def leave(self) -> None:
        """Do nothing: nothing was reserved."""


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
    ) -> RayHolder:
        launch = program.launch
        assert isinstance(launch, ApiServerLaunch)
        room = NodeRoom(ranks.cluster, node)
        mission = Mission(name, launch.incarnation, room, lambda _: launch, ends_once=True)
        return RayHolder(mission, on_status, on_line)

    return Role(
        name=name,
        module="server",
        launch=lambda incarnation: ApiServerLaunch(
            name,
            on_node,
            incarnation,
            ranks.environment,
            ranks.cluster_key,
            node,
            str(BUNDLED_MODEL),
        ),
        member=("front_end", -1),
        start=start,
    )
