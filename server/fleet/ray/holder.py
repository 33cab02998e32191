"""Fills a place with an actor of a Ray cluster and the program below it."""

import asyncio
import logging
from collections import deque

import msgspec

from engine.shared.lifeline import CANNOT_START
from engine.shared.messages import ChildFailed, ChildProgress
from server.fleet.child import KEPT_LOG_LINES, Ended, Program, ended
from server.fleet.ray.cluster import ActorLost, RemoteActor
from server.fleet.ray.messages import ActorEvent, ActorLaunch, Exited, Line
from server.fleet.ray.versions import differences

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 0.5
"""Seconds between looks at whether there is room now."""

KILL_WITHIN = 2.0
"""Seconds that an actor gets to end its program before it is ended itself."""


class RayHolder:
    """One program somewhere in the cluster, from the wish for room to its end: a `Holder`.

    Subclasses know where its actor goes, and what that has to start.
    """

    ends_once = False
    """Whether a second request to end is not passed on, since the program would then end without
    draining."""

    def __init__(self, program: Program, incarnation: int) -> None:
        """Begin to fill a place, within an event loop, with a program as on this node."""
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

    # -- where ----------------------------------------------------------------------------------

    async def find_room(self) -> str:
        """Wait until there is room, telling for what; return the node's name."""
        raise NotImplementedError

    def start_actor(self, name: str) -> RemoteActor:
        """Start an actor in the room that was found."""
        raise NotImplementedError

    def order(self) -> ActorLaunch:
        """Return what the actor has to start."""
        raise NotImplementedError

    def lost_node(self) -> None:
        """The actor has gone, and maybe its node."""

    async def leave(self) -> None:
        """Leave nothing in the cluster; its actor has been killed."""

    # -- its life --------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return not self._life.done()

    async def wait(self) -> Ended:
        """Wait until it has ended and nothing of it is left in the cluster."""
        return await asyncio.shield(self._life)

    def terminate(self) -> None:
        """Ask the program to end; one that has not been started yet never will be."""
        if not self._has_program or self._actor is None:
            self._give_up()
        elif not (self._asked_to_end and self.ends_once):
            self._actor.tell("terminate")
        self._asked_to_end = True

    def kill(self) -> None:
        """End the program at once."""
        if not self._has_program or self._actor is None:
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
            self.node = await self.find_room()
            return await self._run()
        except asyncio.CancelledError:
            return Ended(0, "gave up its place before it had started")
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
        except Exception:  # lines are no reason to lose an engine
            logger.exception("a line of %s cannot be shown", self.name)
