"""The coordinator's shell in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.events import Event, FromMember, PublishOrder, PublishView, Reply, Subscribed, Tick
from coordinator.state import CoordinatorParameters
from engine.shared.messages import MemberKind, MemberMessage
from tests.faults.network import Process
from tests.faults.parts import TIMEOUT

if TYPE_CHECKING:
    from tests.faults.world import World


class Hub(Process):
    """One coordinator process."""

    def __init__(self, world: World, incarnation: int) -> None:
        super().__init__(world.clock, "coordinator", incarnation)
        self._world = world
        self.state = world.parts.coordinator(
            CoordinatorParameters(
                epoch=incarnation,
                front_publish="front",
                back_publish="back",
                back_output="output",
                publish_interval=0.1,
                publish_idle_interval=3.0,
                member_timeout=TIMEOUT,
            )
        )
        self._tick_at = float("inf")
        self.after(0.0, self.handle, Tick())

    def from_member(self, sender: Process, message: MemberMessage) -> None:
        """Receive a member's message."""
        self._senders[sender.name.encode()] = sender
        self.handle(FromMember(sender.name.encode(), message))

    @property
    def _senders(self) -> dict[bytes, Process]:
        return self._world.senders

    def subscribed(self, kind: MemberKind) -> None:
        """Handle a member's (re)connection to a publish socket."""
        self.handle(Subscribed(kind))

    def handle(self, event: Event) -> None:
        """Pass an event to the state and perform the actions."""
        now = self.clock.now
        world, network = self._world, self._world.network
        for action in self.state.handle(event, now):
            match action:
                case Reply(to, message):
                    member = self._senders.get(to)
                    if member is not None and hasattr(member, "reply"):
                        network.send(self, member, "registration", member.reply, message)
                case PublishView(view):
                    shown = action.message
                    world.published(view)
                    for front in world.fronts.values():
                        if front.is_subscribed:
                            network.send(self, front, "views", front.view_arrived, shown)
                case PublishOrder(order):
                    for engine in world.engines.values():
                        if engine.is_subscribed:
                            network.send(self, engine, "orders", engine.order_arrived, order)
        due = self.state.next_deadline(now)
        if due < self._tick_at:
            self._tick_at = due
            self.after(max(0.0, due - now) + 0.001, self._tick, due)

    def _tick(self, due: float) -> None:
        if due == self._tick_at:
            self._tick_at = float("inf")
            self.handle(Tick())
