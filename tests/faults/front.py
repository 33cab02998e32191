"""A front end in virtual time: registration, and the router in its shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.shared.membership import HELLO_INTERVAL, Joined
from engine.shared.messages import (
    AddRequest,
    ClusterView,
    CoordinatorReply,
    EngineDead,
    EngineInput,
    FrontEndAddresses,
    FrontEndNotice,
    Hello,
    KvBlocks,
    RouteHello,
    StepOutputs,
    ViewChange,
)
from server.router.engine_client import BLOCK_QUERY_INTERVAL, TICK_INTERVAL
from server.router.events import EngineHello, Tick
from server.router.followed_view import FollowedView
from server.router.shell import RouterShell
from tests.faults.network import Process
from tests.faults.parts import HEARTBEAT
from tests.faults.sockets import Line

if TYPE_CHECKING:
    from tests.faults.world import World


class Front(Process):
    """One front-end process."""

    def __init__(self, world: World, index: int, incarnation: int) -> None:
        super().__init__(world.clock, f"front end {index}", incarnation)
        self._world = world
        self.index = index
        self.is_subscribed = False
        self.num_resumed = 0
        parts = world.parts
        self._membership = parts.membership(
            Hello(
                kind="front_end",
                index=index,
                incarnation=incarnation,
                host="node",
                pid=1,
                group_config={"model": "m"},
                addresses=FrontEndAddresses(f"requests-{incarnation}", f"outputs-{incarnation}"),
            ),
            HEARTBEAT,
        )
        plan = world.plan
        self.router = parts.router(
            index, incarnation, plan.max_resumes, prefix_caching=plan.prefix_caching
        )
        self.shell = RouterShell(
            self.router,
            send=self._send,
            notify=self._notify,
            on_idle=lambda: None,
            metrics=self,
            clock=lambda: self.clock.now,
        )
        self._links: dict[bytes, Line] = {}
        self._followed = FollowedView(world.clock.now)
        self.after(0.0, self._membership_tick)
        self.after(TICK_INTERVAL, self._client_tick)
        if plan.prefix_caching:
            self.after(0.0, self._follow)

    # -- what the shell counts -------------------------------------------------------------------

    def count(self, name: str, *labels: str | int, by: float = 1) -> None:
        self.num_resumed += name == "requests_resumed"

    def observe(self, name: str, seconds: float) -> None:
        assert seconds >= 0

    # -- out -------------------------------------------------------------------------------------

    def _send(self, identity: bytes, message: EngineInput) -> bool:
        line = self._links.get(identity)
        if line is None or not line.up:
            return False
        engine = line.engine
        if isinstance(message, AddRequest):
            self._world.assigned(message, engine)
            routes = self.router.members.routes.values()
            awake = [route.entry.rank for route in routes if route.is_usable]
            pinned = self._world.is_pinned(message.request_id)
            assert pinned or engine.rank in awake, f"{engine.name} is halted, {awake} are not"
        network = self._world.network
        network.send(self, engine, "requests", engine.input_arrived, line, message, control=False)
        return True

    def _notify(self, notice: FrontEndNotice) -> None:
        hub = self._world.hub
        self._world.network.send(self, hub, "notices", hub.handle, notice)

    def _membership_tick(self) -> None:
        self._send_due()
        joining = self._membership.epoch is None
        self.after(HELLO_INTERVAL if joining else HEARTBEAT, self._membership_tick)

    def _send_due(self) -> None:
        for message in self._membership.tick(self.clock.now):
            self._world.to_hub(self, message)

    def _client_tick(self) -> None:
        self.shell.handle(Tick())
        self.after(TICK_INTERVAL, self._client_tick)

    def _follow(self) -> None:
        self.shell.query_blocks()
        self.after(BLOCK_QUERY_INTERVAL, self._follow)

    # -- in --------------------------------------------------------------------------------------

    def reply(self, reply: CoordinatorReply) -> None:
        """Receive a reply of the coordinator."""
        event = self._membership.receive(reply)
        if isinstance(event, Joined):
            if not event.again:
                self.is_subscribed = True
                self._membership.ready(None)
                self._subscribe()
            self._send_due()
        elif self._membership.epoch is None:
            self._send_due()

    def _subscribe(self) -> None:
        hub = self._world.hub
        self._world.network.send(
            self, hub, "subscription", hub.subscribed, "front_end", control=False
        )

    def view_arrived(self, message: ClusterView | ViewChange) -> None:
        """Receive a cluster view of the coordinator, or changes to it."""
        view = self._followed.take(message)
        if view is None:
            if self._followed.should_request(self.clock.now):
                self._subscribe()
            return
        before = self.open_routes
        self.shell.handle(view)
        self._world.view_taken(self, before)

    @property
    def open_routes(self) -> set[tuple[int, int]]:
        """Engines that accept requests of this front end."""
        routes = self.router.members.routes.values()
        return {route.engine for route in routes if route.is_open}

    def greeting_arrived(self, identity: bytes, line: Line, hello: RouteHello) -> None:
        """Receive an engine's hello, the first message on each of its connections."""
        if line.up and not line.closed:
            self._links[identity] = line
            self.shell.handle(EngineHello(identity, hello))

    def output_arrived(self, message: StepOutputs | EngineDead | KvBlocks) -> None:
        """Receive tokens, an engine's last words, or cached blocks."""
        self.shell.handle(message)
