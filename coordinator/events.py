"""Events that the coordinator handles, and the actions that it takes."""

from dataclasses import dataclass

from engine.shared.messages import (
    ClusterView,
    CoordinatorReply,
    EngineReport,
    FrontEndNotice,
    GroupOrder,
    MemberKind,
    MemberMessage,
    NodeOrder,
    NodeReport,
    ViewChange,
)


@dataclass(frozen=True)
class FromMember:
    """A message from a member or node on the registration socket; replies go to `sender`."""

    sender: bytes
    message: MemberMessage | NodeReport


@dataclass(frozen=True)
class Subscribed:
    """A peer subscribed to one of the publish sockets and needs the current state."""

    kind: MemberKind


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = FromMember | EngineReport | FrontEndNotice | Subscribed | Tick


@dataclass(frozen=True)
class Reply:
    """Send to one member on the registration socket."""

    to: bytes
    message: CoordinatorReply | NodeOrder


@dataclass(frozen=True)
class PublishView:
    """Publish to all front ends: the change if they have the previous view, else the whole view."""

    view: ClusterView
    change: ViewChange | None = None

    @property
    def message(self) -> ClusterView | ViewChange:
        """The message to send."""
        return self.view if self.change is None else self.change


@dataclass(frozen=True)
class PublishOrder:
    """Send to all engines."""

    order: GroupOrder


@dataclass(frozen=True)
class Notice:
    """A message for the log."""

    text: str


Action = Reply | PublishView | PublishOrder | Notice
