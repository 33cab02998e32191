"""What happens to a coordinator, and what it does about it."""

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
    """A message of a member or a node on the registration socket; the answer goes to `sender`."""

    sender: bytes
    message: MemberMessage | NodeReport


@dataclass(frozen=True)
class Subscribed:
    """A peer subscribed to one of the publish sockets and needs the present state."""

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
    """Send to all front ends: what has changed, if they know the rest, or the whole view."""

    view: ClusterView
    change: ViewChange | None = None

    @property
    def message(self) -> ClusterView | ViewChange:
        """What to send."""
        return self.view if self.change is None else self.change


@dataclass(frozen=True)
class PublishOrder:
    """Send to all engines."""

    order: GroupOrder


@dataclass(frozen=True)
class Notice:
    """Something that people should see in the log."""

    text: str


Action = Reply | PublishView | PublishOrder | Notice
