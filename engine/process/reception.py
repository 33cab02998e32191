"""What an engine's receiver does with what arrives: a state machine without I/O.

It owns the engine's membership and its links to front ends. `handle` takes one event and returns
what the receiver has to do, in this order; `deadline` says when it wants to hear a `Tick`.
"""

import logging
from typing import NamedTuple

from engine.core.events import FrontEndJoined, FrontEndLeft, Rejoined
from engine.core.inbox import InboxItem, Stop, Welcomed
from engine.process.links import FrontEndLinks, LinkChanges
from engine.shared.membership import HELLO_INTERVAL, Joined, Membership, Rejected
from engine.shared.messages import (
    AbortRequests,
    AdapterSheet,
    AddRequest,
    CoordinatorReply,
    EngineInput,
    EngineSetup,
    FleetOrder,
    FollowFleet,
    FormGroup,
    FrontEndEntry,
    FrontEnds,
    GroupOrder,
    GroupStatus,
    HeartbeatAck,
    HeldAdapter,
    HoldAdapters,
    KvBlocksWanted,
    MemberMessage,
    Refused,
    RouteHello,
    RouteTaken,
    StartDpWave,
    UtilityCall,
    WeightsSource,
    Welcome,
)

logger = logging.getLogger(__name__)

# -- events, beside the messages that arrive -----------------------------------------------------


class Serve(NamedTuple):
    """The engine has loaded its model: tell the coordinator and the front ends."""

    setup: EngineSetup


class WantNothingNew(NamedTuple):
    """The engine drains: tell the coordinator and the front ends."""


class StandInGroup(NamedTuple):
    """The engine's state in its lockstep group has changed: tell the coordinator."""

    status: GroupStatus


class HaveAdapters(NamedTuple):
    """The engine knows this sheet and has these adapters: tell the coordinator."""

    sheet: AdapterSheet
    held: list[HeldAdapter]


class Leave(NamedTuple):
    """The engine ends."""


class Tick(NamedTuple):
    """Time has passed."""


Command = Serve | WantNothingNew | StandInGroup | HaveAdapters | Leave
"""What the engine's loop tells its receiver."""

Event = CoordinatorReply | GroupOrder | EngineInput | Command | Tick

# -- actions -------------------------------------------------------------------------------------


class Register(NamedTuple):
    """Send this on the registration socket."""

    message: MemberMessage


class Follow(NamedTuple):
    """Subscribe to the coordinator's orders and open the way for reports, here and no more where
    they were before."""

    orders_address: str
    reports_address: str


class Connect(NamedTuple):
    """Open the ways to and from a front end."""

    entry: FrontEndEntry


class Disconnect(NamedTuple):
    """Close the ways to and from a front end."""

    front_end: int


class Greet(NamedTuple):
    """Send a hello on the request connection of a front end."""

    front_end: int
    hello: RouteHello


class Deliver(NamedTuple):
    """Put this into the loop's inbox."""

    item: InboxItem


class Supersede(NamedTuple):
    """Free a loop that waits in a group with a smaller number."""

    topology: int


class Announce(NamedTuple):
    """Tell the supervisor that front ends route to the engine, except for these."""

    unconfirmed: list[int]


class Close(NamedTuple):
    """Close everything and end."""


Action = Register | Follow | Connect | Disconnect | Greet | Deliver | Supersede | Announce | Close


class Reception:
    """One engine's receiver without its sockets."""

    def __init__(self, membership: Membership, links: FrontEndLinks) -> None:
        self.deadline = float("-inf")
        """When the next `Tick` is due at the latest (seconds, monotonic)."""
        self.sheet: AdapterSheet | None = None
        """The newest sheet of adapters; any thread."""
        self._membership = membership
        self._links = links
        self._followed: Follow | None = None
        self._refusal = ""

    @property
    def rank(self) -> int:
        """The engine's rank; -1 while it has none."""
        return self._membership.index

    def note_wave(self, wave: int) -> None:
        """The engine is in `wave`, which a restarted coordinator has to be told; any thread."""
        self._membership.wave = max(self._membership.wave, wave)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event at `now`; return what to do. Unknown events are ignored."""
        match event:
            case AddRequest() | AbortRequests() | UtilityCall() | KvBlocksWanted():
                return [Deliver(event)]
            case Welcome() | Refused() | HeartbeatAck():
                actions = self._reply(event, now)
            case StartDpWave() | FormGroup() | FrontEnds() | HoldAdapters() | FollowFleet():
                if event.group != self._membership.group:
                    return []  # published for all engine groups
                actions = self._ordered(event, now)
            case RouteTaken():
                self._links.answered(event)
                actions = []
            case Serve(setup):
                self._membership.ready(setup)
                self._links.serve(now)
                actions = []
            case WantNothingNew():
                self._membership.drain()
                self._links.drain(now)
                actions = []
            case StandInGroup(status):
                self._membership.set_group_status(status)
                actions = []
            case HaveAdapters(sheet, held):
                self._membership.adapters = sheet
                self._membership.set_adapters(held)
                actions = []
            case Leave():
                return [Register(self._membership.goodbye()), Close()]
            case Tick():
                actions = []
            case _:
                logger.warning("%s ignored", type(event).__name__)
                return []
        return actions + self._due(now)

    def _ordered(self, order: GroupOrder, now: float) -> list[Action]:
        match order:
            case StartDpWave():
                return [Deliver(order)]
            case FormGroup():
                return [Supersede(order.topology), Deliver(order)]
            case FrontEnds(epoch, front_ends):
                return self._listed(epoch, front_ends, now)
            case HoldAdapters(epoch, sheet):
                if epoch != self._membership.epoch:
                    return []
                self._know(sheet)
                return [Deliver(order)]
            case FollowFleet(epoch, fleet):
                return self._follow(fleet) if epoch == self._membership.epoch else []

    # -- the coordinator -------------------------------------------------------------------------

    def _reply(self, reply: CoordinatorReply, now: float) -> list[Action]:
        outcome = self._membership.receive(reply)
        if isinstance(outcome, Rejected):
            if outcome.serving and not outcome.replaced:
                if outcome.reason != self._refusal:
                    logger.error(
                        "the coordinator refused this engine, which goes on serving and keeps "
                        "asking: %s", outcome.reason,
                    )  # fmt: skip
                self._refusal = outcome.reason
                return []
            error = f"the coordinator refused this engine: {outcome.reason}"
            return [Deliver(Stop(error))]
        if isinstance(outcome, Joined):
            return self._joined(outcome.welcome, now, again=outcome.again)
        return []

    def _joined(self, welcome: Welcome, now: float, *, again: bool) -> list[Action]:
        actions: list[Action] = []
        self._refusal = ""
        self._know(welcome.adapters)
        follow = Follow(welcome.publish_address, welcome.output_address)
        if follow != self._followed:
            self._followed = follow
            actions.append(follow)
        if again:
            logger.warning("registered again: the coordinator had forgotten this process")
            actions.append(Deliver(Rejoined(welcome.wave)))
            if welcome.adapters is not None:
                actions.append(Deliver(HoldAdapters(welcome.epoch, welcome.adapters)))
        else:
            logger.info("joined as rank %d", welcome.index)
            actions.append(Deliver(Welcomed(welcome.index, welcome.wave)))
        actions += self._follow(welcome.fleet)
        return actions + self._listed(welcome.epoch, welcome.front_ends, now)

    @property
    def ordered_weights(self) -> WeightsSource | None:
        """What the engine has to load instead of the model of its settings."""
        order = self._membership.fleet
        return None if order is None else order.weights

    def _follow(self, order: FleetOrder | None) -> list[Action]:
        known = self._membership.fleet
        if order is None or order.revision <= (0 if known is None else known.revision):
            return []
        self._membership.fleet = order
        return [Deliver(order)]

    def _know(self, sheet: AdapterSheet | None) -> None:
        if sheet is not None and (self.sheet is None or sheet.revision > self.sheet.revision):
            self.sheet = sheet

    def _listed(self, epoch: int, entries: list[FrontEndEntry], now: float) -> list[Action]:
        if epoch != self._membership.epoch:
            return []
        return _link_actions(self._links.update(self.rank, epoch, entries, now))

    # -- time ------------------------------------------------------------------------------------

    def _due(self, now: float) -> list[Action]:
        """Return what is to be sent by now, and whether the engine can be counted on."""
        actions: list[Action] = [Register(message) for message in self._membership.tick(now)]
        actions += _link_actions(self._links.tick(self.rank, now))
        unconfirmed = self._links.take_unconfirmed(now)
        if unconfirmed is not None:
            actions.append(Announce(unconfirmed))
        is_joining = self._membership.epoch is None
        self.deadline = now + (HELLO_INTERVAL if is_joining else self._links.wait)
        return actions


def _link_actions(changes: LinkChanges) -> list[Action]:
    actions: list[Action] = []
    for index in changes.left:
        actions += [Disconnect(index), Deliver(FrontEndLeft(index))]
    for entry in changes.joined:
        # Outputs may follow as soon as a request does: the way back has to be there first.
        actions += [Connect(entry), Deliver(FrontEndJoined(entry.index, entry.incarnation))]
    return actions + [Greet(index, hello) for index, hello in changes.hellos]
