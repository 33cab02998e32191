"""A member's side of joining and staying in the cluster: a state machine without I/O.

The shell that owns the registration socket sends what `tick` returns, passes received messages to
`receive` and acts on the returned events. Losing any message only costs one interval.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from engine.shared.group_config import stated_in
from engine.shared.messages import (
    AdapterLoadResult,
    AdapterTable,
    CoordinatorReply,
    Draining,
    EngineSetup,
    FleetOrder,
    Goodbye,
    GroupStatus,
    Heartbeat,
    HeartbeatAck,
    Hello,
    MemberMessage,
    ProcessUse,
    Ready,
    Refused,
    Welcome,
)
from engine.shared.version import (
    PROTOCOL_VERSION,
    SPOKEN_PROTOCOLS,
    SWELL_VERSION,
    next_protocol,
)

HELLO_INTERVAL = 0.5
"""Seconds between two attempts to join."""

JOIN_TIMEOUT = 60.0
"""Seconds until a process that finds no coordinator, or no free number, gives up."""

_PROTOCOL_REFUSALS = 4 * len(SPOKEN_PROTOCOLS)
"""Number of protocol refusals until they are final. A repeated HELLO is refused twice, so one
refusal per protocol is not enough."""


@dataclass(frozen=True)
class Joined:
    """The coordinator accepted this member; `again` after a coordinator restart."""

    welcome: Welcome
    again: bool


@dataclass(frozen=True)
class Rejected:
    """The coordinator refused this member; `replaced` if another has taken its number.

    A `serving` member continues to serve: it keeps retrying, and its peers still reach it.
    """

    reason: str
    replaced: bool = False
    serving: bool = False


MembershipEvent = Joined | Rejected


class Membership:
    """One member's side of the registration handshake."""

    def __init__(
        self,
        hello: Hello,
        heartbeat_interval: float,
        use: Callable[[], ProcessUse | None] = lambda: None,
    ) -> None:
        """`hello` states who joins; index -1 requests a number. `use` returns the process's
        resource usage, sent with each heartbeat."""
        self._hello = hello
        self._interval = heartbeat_interval
        self._use = use
        self._setup: EngineSetup | None = None
        self._is_ready = False
        self._is_draining = False
        self._group_status: GroupStatus | None = None
        self._held: list[AdapterLoadResult] = []
        self.adapters: AdapterTable | None = None
        """Newest known adapter table, sent to a coordinator that has restarted."""
        self.fleet: FleetOrder | None = None
        """Newest known fleet order, sent likewise."""
        self._joined_once = False
        self._protocol = PROTOCOL_VERSION
        self._protocol_refusals = 0
        self._next_send = float("-inf")
        self.epoch: int | None = None
        """Epoch of the coordinator that accepted this member; None while joining."""
        self.index = hello.index
        self.wave = 0
        """Newest known wave, sent to a coordinator that has restarted."""

    def ready(self, setup: EngineSetup | None) -> None:
        """Mark the member as set up; READY is sent at the next tick."""
        self._setup = setup
        self._is_ready = True
        self._next_send = float("-inf")

    def drain(self) -> None:
        """Mark the member as draining; DRAINING is sent at the next tick."""
        self._is_draining = True
        self._next_send = float("-inf")

    def set_group_status(self, group_status: GroupStatus) -> None:
        """Set the member's state in its lockstep group; sent at the next tick."""
        self._group_status = group_status
        self._next_send = float("-inf")

    def set_adapters(self, held: list[AdapterLoadResult]) -> None:
        """Set the states of the member's adapters; sent at the next tick."""
        self._held = held
        self._next_send = float("-inf")

    def tick(self, now: float) -> list[MemberMessage]:
        """Return the messages to send at `now` (seconds, monotonic)."""
        if now < self._next_send:
            return []
        me = self._hello
        if self.epoch is None:
            self._next_send = now + HELLO_INTERVAL
            return [
                replace(
                    me,
                    index=self.index,
                    group_config=stated_in(me.group_config, self._protocol),
                    wave=self.wave,
                    protocol=self._protocol,
                    version=SWELL_VERSION,
                    given=self._joined_once and me.index < 0,
                    adapters=self.adapters,
                    fleet=self.fleet,
                    takes_changes=me.kind == "front_end",
                )
            ]
        self._next_send = now + self._interval
        who, status = (me.kind, self.index, me.incarnation), self._group_status
        if self._is_draining:
            return [Draining(*who, status, self._held, self._use())]
        if self._is_ready:
            # READY doubles as the heartbeat of a ready member: losing one does not matter.
            return [Ready(*who, self._setup, status, self._held, self._use())]
        return [Heartbeat(*who, status, self._held, self._use())]

    @property
    def group(self) -> str:
        """The member's engine group; messages published for other groups are ignored."""
        return self._hello.group

    def goodbye(self) -> Goodbye:
        """Return the message that announces departure."""
        return Goodbye(self._hello.kind, self.index, self._hello.incarnation)

    def receive(self, reply: CoordinatorReply) -> MembershipEvent | None:
        """Process one message of the coordinator."""
        if isinstance(reply, Refused):
            if not reply.final:
                return None
            if reply.field == "protocol":
                self._protocol_refusals += 1
                self._protocol = next_protocol(self._protocol)
                if self._protocol_refusals < _PROTOCOL_REFUSALS:
                    self._next_send = float("-inf")
                    return None
            return Rejected(
                reply.reason,
                replaced=self._joined_once and reply.field == "index",
                # A restarted coordinator does not know it yet: it, or its successor, may accept it
                # again.
                serving=self._joined_once and self._is_ready and self.epoch is None,
            )
        if isinstance(reply, HeartbeatAck):
            if self.epoch is not None and (not reply.known or reply.epoch != self.epoch):
                self.epoch = None
                self._protocol, self._protocol_refusals = PROTOCOL_VERSION, 0
                self._next_send = float("-inf")
            return None
        return self._welcomed(reply)

    def _welcomed(self, welcome: Welcome) -> Joined | Rejected | None:
        if welcome.epoch == self.epoch:
            return None  # answer to a repeated HELLO
        if welcome.protocol not in SPOKEN_PROTOCOLS:
            return Rejected(
                f"protocol is {PROTOCOL_VERSION} here (Swell {SWELL_VERSION}) but "
                f"{welcome.protocol or 'older than 1'} at the coordinator (Swell "
                f"{welcome.version or 'unknown'}), which accepted it anyway"
            )
        again = self._joined_once
        self.epoch = welcome.epoch
        self.index = welcome.index
        self.wave = max(self.wave, welcome.wave)
        self._joined_once = True
        self._protocol_refusals = 0
        self._next_send = float("-inf")
        return Joined(welcome, again)
