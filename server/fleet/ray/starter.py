"""Starts programs on the nodes of a Ray cluster.

An engine gets a placement group and an actor in it, an API server an actor on its node.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from engine.shared.config import EngineLaunch
from engine.shared.lifeline import CANNOT_START
from engine.shared.messages import ChildFailed, ChildProgress
from server.config import FrontEndConfig
from server.fleet.child import RECENT_LOG_LINES, Program, ProgramExit, program_exit
from server.fleet.keeper import Role
from server.fleet.ray.cluster import ActorLost, Group, RayCluster, RemoteActor
from server.fleet.ray.messages import ActorEvent, ActorLaunch, Exited, Line
from server.fleet.ray.packing import Packing
from server.fleet.ray.resources import differences

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.5
"""Seconds between checks for room."""

KILL_TIMEOUT = 2.0
"""Seconds for an actor to kill its program before the actor itself is killed."""


class RayHandle:
    """One program in the cluster, from requesting resources to its end: a `ProgramHandle`.

    Subclasses determine the actor's node and its launch message.
    """

    terminates_once = False
    """Whether only the first `terminate` is forwarded, since a second would end the program without
    draining."""

    def __init__(self, program: Program, incarnation: int) -> None:
        """Start the lifecycle task; call from within an event loop."""
        self.name = program.name
        self.node = ""
        self.last_lines: deque[str] = deque(maxlen=RECENT_LOG_LINES)
        self._incarnation = incarnation
        self.report = program.on_status
        self._on_line = program.on_line
        self._actor: RemoteActor | None = None
        self._has_program = False
        self._termination_requested = False
        self._killing: asyncio.Task[None] | None = None
        self._lifecycle = asyncio.create_task(self._run_lifecycle())

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
        return not self._lifecycle.done()

    async def wait(self) -> ProgramExit:
        """Wait until it has ended and its resources are released."""
        return await asyncio.shield(self._lifecycle)

    def terminate(self) -> None:
        """Request the program's exit; cancels a program that has not been started yet."""
        if not self._has_program or self._actor is None:
            self._give_up()
        elif not (self._termination_requested and self.terminates_once):
            self._actor.notify("terminate")
        self._termination_requested = True

    def kill(self) -> None:
        """Kill the program."""
        if not self._has_program or self._actor is None:
            self._give_up()
        elif self._killing is None:
            self._killing = asyncio.create_task(self._kill(self._actor))

    def _give_up(self) -> None:
        if not self._lifecycle.cancelling():  # a second cancellation would interrupt its cleanup
            self._lifecycle.cancel()

    async def _kill(self, actor: RemoteActor) -> None:
        actor.notify("kill")
        await asyncio.wait([self._lifecycle], timeout=KILL_TIMEOUT)
        await actor.kill()

    async def _run_lifecycle(self) -> ProgramExit:
        try:
            self.node = await self.find_room()
            return await self._run()
        except asyncio.CancelledError:
            return ProgramExit(0, "was cancelled before it had started")
        except ActorLost as error:
            if not error.node_survived:
                self.lost_node()
            return ProgramExit(None, f"was lost with its actor on {self.node}: {error}")
        finally:
            if self._actor is not None:
                await self._actor.kill()
            await self.leave()

    async def _run(self) -> ProgramExit:
        self.report(ChildProgress(f"starting an actor on {self.node}"))
        name = f"swell {self.name} {self._incarnation:x}"
        actor = self._actor = self.start_actor(name)
        different = differences(await actor.call("installed"), self.node)
        if different is not None:
            self.report(ChildFailed(different))
            return program_exit(CANNOT_START)
        try:
            await actor.call("start", msgspec.msgpack.encode(self.order()))
        except OSError as error:
            return ProgramExit(1, f"cannot be started on {self.node}: {error}")
        self._has_program = True
        while True:
            encoded = await actor.call("events")
            for event in msgspec.msgpack.decode(encoded, type=list[ActorEvent]):
                match event:
                    case Exited(code):
                        return program_exit(code)
                    case Line(text):
                        self._show(text)
                    case ChildFailed(reason):
                        self.report(ChildFailed(f"{reason} (on node {self.node})"))
                    case status:
                        self.report(status)

    def _show(self, line: str) -> None:
        self.last_lines.append(line)
        try:
            self._on_line(line)
        except Exception:  # output errors must not end an engine
            logger.exception("a line of %s cannot be shown", self.name)


PLACEMENT_TIMEOUT = 3.0
"""Seconds for a group to be placed on a node with room before free resources are read again."""

AVOID_SECONDS = 30.0
"""How long a node that lost a rank is a last resort: Ray detects lost nodes only later."""


@dataclass(kw_only=True)
class Ranks:
    """State shared by all ranks: the cluster, and the ranks per node."""

    cluster: RayCluster
    packing: Packing
    environment: dict[str, str]
    """Variables for every engine."""
    cluster_key: bytes | None
    """The cluster's shared secret."""
    planned: dict[str, str]
    """Node id of each rank's first placement, by role name."""
    existing: Mapping[str, Group]
    """Placement groups created by others, by role name."""
    ranks_per_node: Counter[str] = field(default_factory=Counter)
    """Number of ranks per node id."""
    _avoided: dict[str, float] = field(default_factory=dict)

    def avoid(self, node: str) -> None:
        """Make a node a last resort, after it lost a rank with its actor."""
        self._avoided[node] = time.monotonic() + AVOID_SECONDS

    def avoided(self) -> set[str]:
        """Return the ids of nodes that are last resorts."""
        now = time.monotonic()
        return {node for node, until in self._avoided.items() if until > now}

    async def start(self, program: Program) -> RayHandle:
        """Start placing a program, which may have to wait for room: a `Starter`."""
        assert isinstance(program.launch, EngineLaunch)
        return RankHandle(self, program, program.launch)


class RankHandle(RayHandle):
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
        self.report(ChildProgress("looking for room"))
        if self.name in ranks.existing:
            return await self._use_existing(ranks.existing[self.name])
        while True:
            nodes = await ranks.cluster.nodes()
            planned = ranks.planned.pop(self.name, None)
            choice = ranks.packing.choose(
                [node for node in nodes if planned in (None, node.id)] or nodes,
                ranks.ranks_per_node,
                ranks.avoided(),
            )
            if choice.node is not None:
                if await self._try_node(choice.node.id):
                    return choice.node.name
                continue
            self.report(ChildProgress(choice.reason, choice.lacks))
            # Autoscalers learn what is missing from groups that cannot be placed.
            if self._group is None:
                self._group = await self._reserve(None)
            node_id = await ranks.cluster.placed_on(self._group)
            if node_id is None:
                await asyncio.sleep(POLL_INTERVAL)
                continue
            self._count_rank(node_id)
            return next((node.name for node in nodes if node.id == node_id), node_id)

    async def _use_existing(self, group: Group) -> str:
        """Wait until a group is placed, or placed again after a node's death."""
        self._group = group
        while True:
            node_id = await self._ranks.cluster.placed_on(group)
            if node_id is None:
                waits = "waiting for its placement group to be placed"
                self.report(ChildProgress(waits, "placement group"))
            elif await self._finds_devices(group):
                break
            await asyncio.sleep(POLL_INTERVAL)
        self._count_rank(node_id)
        nodes = await self._ranks.cluster.nodes()
        return next((node.name for node in nodes if node.id == node_id), node_id)

    async def _finds_devices(self, group: Group) -> bool:
        if not group.gpus:
            return True
        devices = await self._ranks.cluster.devices(group)
        if devices is None:
            self.report(ChildProgress("waiting for the GPUs of its placement group", "GPU"))
            return False
        self._environment["CUDA_VISIBLE_DEVICES"] = devices
        return True

    async def _try_node(self, node_id: str) -> bool:
        self._count_rank(node_id)
        try:
            await self._release_group()
            self._group = await self._reserve(node_id)
            deadline = time.monotonic() + PLACEMENT_TIMEOUT
            while time.monotonic() < deadline:
                if await self._ranks.cluster.placed_on(self._group) is not None:
                    return True
                await asyncio.sleep(0.02)
        except BaseException:
            self._uncount_rank()
            raise
        self._ranks.avoid(node_id)
        self._uncount_rank()
        await self._release_group()
        return False

    async def _reserve(self, node_id: str | None) -> Group:
        return await self._ranks.cluster.reserve(
            f"swell {self.name}",
            self._ranks.packing.needs,
            node=node_id,
            excluded=self._ranks.packing.full(self._ranks.ranks_per_node),
        )

    def _count_rank(self, node_id: str) -> None:
        self._node_id = node_id
        self._ranks.ranks_per_node[node_id] += 1

    def _uncount_rank(self) -> None:
        if self._node_id is not None:
            self._ranks.ranks_per_node[self._node_id] -= 1
            self._node_id = None

    async def _release_group(self) -> None:
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
        await self._release_group()
        self._uncount_rank()


class ApiServerHandle(RayHandle):
    """An API server on a given node; uses none of the resources that engines request."""

    terminates_once = True

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
        name = self._launch.node
        while True:
            nodes = await self._cluster.nodes()
            self._node_id = next((node.id for node in nodes if node.name == name), "")
            if self._node_id:
                return name
            self.report(ChildProgress("waiting for its node"))
            await asyncio.sleep(POLL_INTERVAL)

    def start_actor(self, name: str) -> RemoteActor:
        """Start an actor on that node."""
        return self._cluster.start_actor_on(name, self._node_id)


def api_server_role(ranks: Ranks, config: FrontEndConfig, node: str, port: int) -> Role:
    """Return the role of an API server on a node, given the node's name, which is its address."""
    name = f"api on {node}"
    on_node = config.changed(http={"host": node, "port": port})

    async def start(program: Program) -> RayHandle:
        assert isinstance(program.launch, ActorLaunch)
        return ApiServerHandle(ranks.cluster, program, program.launch)

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
