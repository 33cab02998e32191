"""Fills places with actors of a Ray cluster: for each a placement group, an actor, an engine."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import msgspec

from engine.shared.config import BUNDLED_MODEL, EngineLaunch
from engine.shared.lifeline import CANNOT_START
from engine.shared.messages import ChildFailed, ChildProgress, ChildStatus
from server.fleet.holder import Ended, Program, ended
from server.fleet.ray.cluster import ActorLost, Group, RayCluster, RemoteActor
from server.fleet.ray.messages import ActorEvent, ActorLaunch, ApiServerLaunch, Exited, Line
from server.fleet.ray.packing import Packing
from server.fleet.ray.versions import differences

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 0.5
"""Seconds between looks at whether a rank that waits for room can be placed."""

PLACE_WITHIN = 3.0
"""Seconds that a node with room has to take a rank, before free resources are looked at again."""

AVOID_SECONDS = 30.0
"""How long a node that lost a rank is the last choice: Ray notices a lost node only later."""

KILL_WITHIN = 2.0
"""Seconds that an actor gets to end its engine before it is ended itself."""

_KEPT_LOG_LINES = 30


class Ranks:
    """What the holders of all ranks share: the cluster, and which nodes they are on."""

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
        """Make it.

        Args:
            environment: variables that every engine gets.
            cluster_key: the cluster's shared secret.
            planned: the node of each first holder, by name of the place.
            existing: placement groups of somebody else's, by name of the place.
        """
        self.cluster = cluster
        self.packing = packing
        self.environment = environment
        self.cluster_key = cluster_key
        self.planned = planned
        self.existing = existing
        self.held: Counter[str] = Counter()
        """How many ranks each node has, by id."""
        self._avoided: dict[str, float] = {}

    def avoid(self, node: str) -> None:
        """A node has just lost a rank with its actor."""
        self._avoided[node] = time.monotonic() + AVOID_SECONDS

    def avoided(self) -> set[str]:
        """Return the ids of nodes that are the last choice."""
        now = time.monotonic()
        return {node for node, until in self._avoided.items() if until > now}

    async def start(
        self,
        program: Program,
        *,
        on_status: Callable[[ChildStatus], None],
        on_line: Callable[[str], None],
    ) -> "RayHolder":
        """Begin to fill a place, maybe by waiting for room: a `Starter`."""
        return RayHolder(self, program, on_status, on_line)


class RayHolder:
    """One engine somewhere in the cluster, from the wish for room to its end: a `Holder`."""

    def __init__(
        self,
        ranks: Ranks,
        program: Program,
        on_status: Callable[[ChildStatus], None],
        on_line: Callable[[str], None],
    ) -> None:
        self.name = program.name
        self.node = ""
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LOG_LINES)
        self._ranks = ranks
        self._program = program
        self._on_status = on_status
        self._on_line = on_line
        self._group: Group | None = None
        self._node_id: str | None = None
        self._actor: RemoteActor | None = None
        self._has_engine = False
        self._killing: asyncio.Task[None] | None = None
        self._life = asyncio.create_task(self._live())

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return not self._life.done()

    async def wait(self) -> Ended:
        """Wait until it has ended and nothing of it is left in the cluster."""
        return await asyncio.shield(self._life)

    def terminate(self) -> None:
        """Ask the engine to end; one that has not been started yet never will be."""
        if self._has_engine and self._actor is not None:
            self._actor.tell("terminate")
        else:
            self._give_up()

    def kill(self) -> None:
        """End the engine at once."""
        if not self._has_engine or self._actor is None:
            self._give_up()
        elif self._killing is None:
            self._killing = asyncio.create_task(self._kill(self._actor))

    def _give_up(self) -> None:
        if not self._life.cancelling():  # twice would keep it from leaving in order
            self._life.cancel()

    async def _kill(self, actor: RemoteActor) -> None:
        actor.tell("kill")
        await asyncio.wait([self._life], timeout=KILL_WITHIN)
        await actor.kill()

    async def _live(self) -> Ended:
        try:
            await self._find_room()
            return await self._run()
        except asyncio.CancelledError:
            return Ended(0, "gave up its place before it had started")
        except ActorLost as error:
            if self._node_id is not None and not error.alone:
                self._ranks.avoid(self._node_id)
            return Ended(None, f"was lost with its actor on {self.node}: {error}")
        finally:
            await self._leave()

    # -- room ------------------------------------------------------------------------------------

    async def _find_room(self) -> None:
        """Get a placement group on some node, however long that takes."""
        ranks = self._ranks
        self._on_status(ChildProgress("looking for room"))
        if self.name in ranks.existing:
            await self._enter(ranks.existing[self.name])
            return
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
                    self.node = choice.node.name
                    return
                continue
            self._on_status(ChildProgress(choice.reason, choice.lacks))
            # A group that nobody can place is how autoscalers learn what is missing.
            if self._group is None:
                self._group = await self._reserve(None)
            node_id = await ranks.cluster.placed_on(self._group)
            if node_id is None:
                await asyncio.sleep(LOOK_INTERVAL)
                continue
            self._hold(node_id)
            self.node = next((node.name for node in nodes if node.id == node_id), node_id)
            return

    async def _enter(self, group: Group) -> None:
        """Wait until a placement group of somebody else's is there, again after a node's death."""
        self._group = group
        waits = "waiting for its placement group to be placed"
        self._on_status(ChildProgress(waits, "placement group"))
        while True:
            node_id = await self._ranks.cluster.placed_on(group)
            if node_id is not None:
                break
            await asyncio.sleep(LOOK_INTERVAL)
        self._hold(node_id)
        nodes = await self._ranks.cluster.nodes()
        self.node = next((node.name for node in nodes if node.id == node_id), node_id)

    async def _take(self, node_id: str) -> bool:
        """Reserve a place on one node; return whether it was there in time."""
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

    # -- the engine ------------------------------------------------------------------------------

    async def _run(self) -> Ended:
        self._on_status(ChildProgress(f"starting an actor on {self.node}"))
        actor = self._actor = self._start_actor()
        different = differences(await actor.call("installed"), self.node)
        if different is not None:
            return self._cannot_start(different)
        try:
            await actor.call("start", msgspec.msgpack.encode(self._order()))
        except OSError as error:
            return Ended(1, f"cannot be started on {self.node}: {error}")
        self._has_engine = True
        while True:
            told = await actor.call("events")
            for event in msgspec.msgpack.decode(told, type=list[ActorEvent]):
                match event:
                    case Exited(code):
                        return ended(code)
                    case Line(text):
                        self._show(text)
                    case ChildFailed(reason):
                        self._on_status(ChildFailed(f"{reason} (on node {self.node})"))
                    case status:
                        self._on_status(status)

    def _start_actor(self) -> RemoteActor:
        assert self._group is not None
        name = f"swell {self.name} {self._program.launch.incarnation:x}"
        return self._ranks.cluster.start_actor(name, self._group)

    def _order(self) -> ActorLaunch | ApiServerLaunch:
        """Return what the actor has to start."""
        ranks, launch = self._ranks, self._program.launch
        assert isinstance(launch, EngineLaunch)
        return ActorLaunch(
            self.name,
            launch.config,
            launch.incarnation,
            {**ranks.environment, **self._program.environment},
            ranks.cluster_key,
            str(BUNDLED_MODEL),
        )

    def _cannot_start(self, reason: str) -> Ended:
        self._on_status(ChildFailed(reason))
        return ended(CANNOT_START)

    def _show(self, line: str) -> None:
        self.last_lines.append(line)
        try:
            self._on_line(line)
        except Exception:  # lines are no reason to lose an engine
            logger.exception("a line of %s cannot be shown", self.name)

    async def _leave(self) -> None:
        """Leave nothing in the cluster."""
        if self._actor is not None:
            await self._actor.kill()
        await self._give_back()
        self._let_go()
