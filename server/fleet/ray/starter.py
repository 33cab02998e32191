"""Starts programs on the nodes of a Ray cluster.

An engine gets a placement group and an actor in it, an API server an actor on its node.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping

import msgspec

from engine.shared.config import EngineLaunch
from engine.shared.lifeline import CANNOT_START
from engine.shared.messages import ChildFailed, ChildProgress
from server.config import FrontEndConfig
from server.fleet.child import KEPT_LOG_LINES, Ended, Program, ended
from server.fleet.keeper import Role
from server.fleet.ray.cluster import ActorLost, Group, RayCluster, RemoteActor
from server.fleet.ray.messages import ActorEvent, ActorLaunch, Exited, Line
from server.fleet.ray.needs import differences
from server.fleet.ray.packing import Packing

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 0.5
"""Seconds between checks for room."""

KILL_WITHIN = 2.0
"""Seconds for an actor to kill its program before the actor itself is killed."""


class RayHolder:
    """One program in the cluster, from requesting resources to its end: a `Holder`.

    Subclasses determine the actor's node and its launch message.
    """

    ends_once = False
    """Whether only the first `terminate` is forwarded, since a second would end the program without
    draining."""

    def __init__(self, program: Program, incarnation: int) -> None:
        """Start the lifecycle task; call from within an event loop."""
        self.name = program.name
        self.node = ""
        self.last_lines: deque[str] = deque(maxlen=KEPT_LOG_LINES)
        self._incarnation = incarnation
        self.tell = program.on_status
        self._on_line = program.on_line
        self._actor: RemoteActor | None = None
        self._has_program = False
        self._asked_to_end = False
        self._killing: asyncio.Task[None] | None = None
        self._life = asyncio.create_task(self._live())

    # -- placement ------------------------------------------------------------------------------

    async def find_room(self) -> str:
        """Wait until there is room, reporting what is missing; return the node's name."""
        raise NotImplementedError

    def start_actor(self, name: str) -> RemoteActor:
        """Start an actor in the resources found."""
        raise NotImplementedError

    def order(self) -> ActorLaunch:
        """Return the actor's launch message."""
        raise NotImplementedError

    def lost_node(self) -> None:
        """Handle the loss of the actor, and possibly of its node."""

    async def leave(self) -> None:
        """Release all resources in the cluster; the actor has been killed."""

    # -- lifecycle -------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return not self._life.done()

    async def wait(self) -> Ended:
        """Wait until it has ended and its resources are released."""
        return await asyncio.shield(self._life)

    def terminate(self) -> None:
        """Request the program's exit; cancels a program that has not been started yet."""
        if not self._has_program or self._actor is None:
            self._give_up()
        elif not (self._asked_to_end and self.ends_once):
            self._actor.tell("terminate")
        self._asked_to_end = True

    def kill(self) -> None:
        """Kill the program."""
        if not self._has_program or self._actor is None:
            self._give_up()
        elif self._killing is None:
            self._killing = asyncio.create_task(self._kill(self._actor))

    def _give_up(self) -> None:
        if not self._life.cancelling():  # a second cancellation would interrupt its cleanup
            self._life.cancel()

    async def _kill(self, actor: RemoteActor) -> None:
        actor.tell("kill")
        await asyncio.wait([self._life], timeout=KILL_WITHIN)
        await actor.kill()

    async def _live(self) -> Ended:
        try:
            self.node = await self.find_room()
            return await self._run()
        except asyncio.CancelledError:
            return Ended(0, "was cancelled before it had started")
        except ActorLost as error:
            if not error.alone:
                self.lost_node()
            return Ended(None, f"was lost with its actor on {self.node}: {error}")
        finally:
            if self._actor is not None:
                await self._actor.kill()
            await self.leave()

    async def _run(self) -> Ended:
        self.tell(ChildProgress(f"starting an actor on {self.node}"))
        name = f"swell {self.name} {self._incarnation:x}"
        actor = self._actor = self.start_actor(name)
        different = differences(await actor.call("installed"), self.node)
        if different is not None:
            self.tell(ChildFailed(different))
            return ended(CANNOT_START)
        try:
            await actor.call("start", msgspec.msgpack.encode(self.order()))
        except OSError as error:
            return Ended(1, f"cannot be started on {self.node}: {error}")
        self._has_program = True
        while True:
            told = await actor.call("events")
            for event in msgspec.msgpack.decode(told, type=list[ActorEvent]):
                match event:
                    case Exited(code):
                        return ended(code)
                    case Line(text):
                        self._show(text)
                    case ChildFailed(reason):
                        self.tell(ChildFailed(f"{reason} (on node {self.node})"))
                    case status:
                        self.tell(status)

    def _show(self, line: str) -> None:
        self.last_lines.append(line)
        try:
            self._on_line(line)
        except Exception:  # output errors must not end an engine
            logger.exception("a line of %s cannot be shown", self.name)


PLACE_WITHIN = 3.0
"""Seconds for a group to be placed on a node with room before free resources are read again."""

AVOID_SECONDS = 30.0
"""How long a node that lost a rank is a last resort: Ray detects lost nodes only later."""


class Ranks:
    """State shared by all ranks: the cluster, and the ranks per node."""

    def __init__(
        self,
        cluster: RayCluster,
        packing: Packing,
        *,
        environment: dict[str, str],
        cluster_key: bytes | None,
        planned: dict[str, str],
        existing: Mapping[str, Group],
    ) -> None:
        """Make the shared state.

        Args:
            environment: variables for every engine.
            cluster_key: the cluster's shared secret.
            planned: node id of each rank's first placement, by role name.
            existing: placement groups created by others, by role name.
        """
        self.cluster = cluster
        self.packing = packing
        self.environment = environment
        self.cluster_key = cluster_key
        self.planned = planned
        self.existing = existing
        self.held: Counter[str] = Counter()
        """Number of ranks per node id."""
        self._avoided: dict[str, float] = {}

    def avoid(self, node: str) -> None:
        """Make a node a last resort, after it lost a rank with its actor."""
        self._avoided[node] = time.monotonic() + AVOID_SECONDS

    def avoided(self) -> set[str]:
        """Return the ids of nodes that are last resorts."""
        now = time.monotonic()
        return {node for node, until in self._avoided.items() if until > now}

    async def start(self, program: Program) -> RayHolder:
        """Start placing a program, which may have to wait for room: a `Starter`."""
        assert isinstance(program.launch, EngineLaunch)
        return RankHolder(self, program, program.launch)


class RankHolder(RayHolder):
    """One rank, in its own placement group or an existing one."""

    def __init__(self, ranks: Ranks, program: Program, launch: EngineLaunch) -> None:
        super().__init__(program, launch.incarnation)
        self._ranks = ranks
        self._launch = launch
        self._environment = {**ranks.environment, **program.environment}
        self._group: Group | None = None
        self._node_id: str | None = None

    def order(self) -> ActorLaunch:
        """Return the engine's launch message."""
        return ActorLaunch(
            name=self.name,
            engine=self._launch.config,
            incarnation=self._launch.incarnation,
            environment=self._environment,
            cluster_key=self._ranks.cluster_key,
            node=self.node,
        )

    async def find_room(self) -> str:
        """Wait for a placement group on any node; return the node's name."""
        ranks = self._ranks
        self.tell(ChildProgress("looking for room"))
        if self.name in ranks.existing:
            return await self._enter(ranks.existing[self.name])
        while True:
            nodes = await ranks.cluster.nodes()
            planned = ranks.planned.pop(self.name, None)
            choice = ranks.packing.choose(
                [node for node in nodes if planned in (None, node.id)] or nodes,
                ranks.held,
                ranks.avoided(),
            )
            if choice.node is not None:
                if await self._take(choice.node.id):
                    return choice.node.name
                continue
            self.tell(ChildProgress(choice.reason, choice.lacks))
            # Autoscalers learn what is missing from groups that cannot be placed.
            if self._group is None:
                self._group = await self._reserve(None)
            node_id = await ranks.cluster.placed_on(self._group)
            if node_id is None:
                await asyncio.sleep(LOOK_INTERVAL)
                continue
            self._hold(node_id)
            return next((node.name for node in nodes if node.id == node_id), node_id)

    async def _enter(self, group: Group) -> str:
        """Wait until an existing placement group is placed, or placed again after a node's
        death."""
        self._group = group
        while True:
            node_id = await self._ranks.cluster.placed_on(group)
            if node_id is None:
                waits = "waiting for its placement group to be placed"
                self.tell(ChildProgress(waits, "placement group"))
            elif await self._finds_devices(group):
                break
            await asyncio.sleep(LOOK_INTERVAL)
        self._hold(node_id)
        nodes = await self._ranks.cluster.nodes()
        return next((node.name for node in nodes if node.id == node_id), node_id)

    async def _finds_devices(self, group: Group) -> bool:
        if not group.gpus:
            return True
        devices = await self._ranks.cluster.devices(group)
        if devices is None:
            self.tell(ChildProgress("waiting for the GPUs of its placement group", "GPU"))
            return False
        self._environment["CUDA_VISIBLE_DEVICES"] = devices
        return True

    async def _take(self, node_id: str) -> bool:
        self._hold(node_id)
        try:
            await self._give_back()
            self._group = await self._reserve(node_id)
            deadline = time.monotonic() + PLACE_WITHIN
            while time.monotonic() < deadline:
                if await self._ranks.cluster.placed_on(self._group) is not None:
                    return True
                await asyncio.sleep(0.02)
        except BaseException:
            self._let_go()
            raise
        self._ranks.avoid(node_id)
        self._let_go()
        await self._give_back()
        return False

    async def _reserve(self, node_id: str | None) -> Group:
        return await self._ranks.cluster.reserve(
            f"swell {self.name}",
            self._ranks.packing.needs,
            node=node_id,
            never=self._ranks.packing.full(self._ranks.held),
        )

    def _hold(self, node_id: str) -> None:
        self._node_id = node_id
        self._ranks.held[node_id] += 1

    def _let_go(self) -> None:
        if self._node_id is not None:
            self._ranks.held[self._node_id] -= 1
            self._node_id = None

    async def _give_back(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await self._ranks.cluster.release(group)

    def start_actor(self, name: str) -> RemoteActor:
        """Start an actor that takes the whole group."""
        assert self._group is not None
        return self._ranks.cluster.start_actor(name, self._group)

    def lost_node(self) -> None:
        """Prefer other nodes for a while."""
        if self._node_id is not None:
            self._ranks.avoid(self._node_id)

    async def leave(self) -> None:
        """Remove the group if it is ours."""
        await self._give_back()
        self._let_go()


class ApiServerHolder(RayHolder):
    """An API server on a given node; uses none of the resources that engines request."""

    ends_once = True

    def __init__(self, cluster: RayCluster, program: Program, launch: ActorLaunch) -> None:
        super().__init__(program, launch.incarnation)
        self._cluster = cluster
        self._launch = launch
        self._node_id = ""

    def order(self) -> ActorLaunch:
        """Return the API server's launch message."""
        return self._launch

    async def find_room(self) -> str:
        """Wait until the node is in the cluster, also after it was lost."""
        wanted = self._launch.node
        while True:
            nodes = await self._cluster.nodes()
            self._node_id = next((node.id for node in nodes if node.name == wanted), "")
            if self._node_id:
                return wanted
            self.tell(ChildProgress("waiting for its node"))
            await asyncio.sleep(LOOK_INTERVAL)

    def start_actor(self, name: str) -> RemoteActor:
        """Start an actor on that node."""
        return self._cluster.start_actor_on(name, self._node_id)


def api_server_role(ranks: Ranks, config: FrontEndConfig, node: str, port: int) -> Role:
    """Return the role of an API server on a node, given the node's name, which is its address."""
    name = f"api on {node}"
    on_node = config.changed(http={"host": node, "port": port})

    async def start(program: Program) -> RayHolder:
        assert isinstance(program.launch, ActorLaunch)
        return ApiServerHolder(ranks.cluster, program, program.launch)

    return Role(
        name=name,
        module="server",
        launch=lambda incarnation: ActorLaunch(
            name=name,
            api_server=on_node,
            incarnation=incarnation,
            environment=ranks.environment,
            cluster_key=ranks.cluster_key,
            node=node,
        ),
        member=("front_end", -1),
        start=start,
    )
