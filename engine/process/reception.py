"""What an engine's receiver does with what arrives: a state machine without I/O.

It owns the engine's membership and its links to front ends. `handle` takes one event and returns
what the receiver has to do, in this order; `deadline` says when it wants to hear a `Tick`.
"""

import logging
from collections.abc import Iterable
from typing import NamedTuple

from engine.core.events import FrontEndJoined, FrontEndLeft, InboxItem, Rejoined, Stop, Welcomed
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
from engine.shared.roster import Roster

logger = logging.getLogger(__name__)

ASK_INTERVAL = 0.02
"""Seconds between hellos while front ends are asked whether they route to the engine."""

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


class FrontEndLinks:
    """The connections of one engine process to all front ends within its scope.

    Hellos are repeated, as a sign of life over the connections of requests and answers; a lost one
    costs an interval. An engine that has just become ready asks in its hellos which front ends
    route to it already. Its supervisor waits for that before it ends another engine, so that no
    front end is left without one.

    Args:
        incarnation: of the engine.
        node: name of the engine's node.
        grace: seconds for which front ends that a restarted coordinator does not list are kept,
            and for which front ends that do not answer are asked.
        interval: seconds between hellos.
    """

    def __init__(self, incarnation: int, node: str, grace: float, interval: float) -> None:
        self._incarnation = incarnation
        self._node = node
        self._interval = interval
        self._roster: Roster[FrontEndEntry] = Roster(grace)
        self._sessions: dict[int, int] = {}
        self._num_sessions = 0
        self._greet_at = 0.0
        self._grace = grace
        self._ask_until: float | None = None
        self._drains = False
        self._answered: set[int] = set()

    def serve(self, now: float) -> None:
        """The engine serves from now on: ask all front ends whether they route to it."""
        self._ask_until = now + self._grace
        self._greet_at = now

    def drain(self, now: float) -> None:
        """The engine takes nothing new from now on: tell all front ends."""
        self._drains = True
        self._greet_at = now

    def answered(self, answer: RouteTaken) -> None:
        """A front end routes to the engine."""
        self._answered.add(answer.session)

    def take_unconfirmed(self, now: float) -> list[int] | None:
        """Return which front ends still do not route to an engine that serves, once.

        None before it serves, while waiting for them is still worthwhile, and once they were told.
        """
        if self._ask_until is None:
            return None
        unconfirmed = [each for each, of in self._sessions.items() if of not in self._answered]
        if unconfirmed and now < self._ask_until:
            return None
        self._ask_until = None
        return unconfirmed

    @property
    def wait(self) -> float:
        """Seconds after which `tick` has to be called again at the latest."""
        return self._interval if self._ask_until is None else ASK_INTERVAL

    def update(
        self, rank: int, epoch: int, entries: list[FrontEndEntry], now: float
    ) -> list[Action]:
        """Take a complete list of the coordinator of `epoch`; `rank` is this engine's."""
        listed = {each.index: each for each in entries if each.scope.contains(rank, self._node)}
        change = self._roster.update(epoch, listed, now)
        actions = self._leave(change.left)
        for index in change.joined:
            self._num_sessions += 1
            self._sessions[index] = self._num_sessions
            # Outputs may follow as soon as a request does: the way back has to be there first.
            entry = listed[index]
            actions += [Connect(entry), Deliver(FrontEndJoined(index, entry.incarnation))]
        return actions + self._greet(rank, change.joined)

    def tick(self, rank: int, now: float) -> list[Action]:
        """Time has passed."""
        actions = self._leave(self._roster.expire(now))
        if now < self._greet_at:
            return actions
        self._greet_at = now + self.wait
        return actions + self._greet(rank, self._sessions)

    def _leave(self, indices: Iterable[int]) -> list[Action]:
        actions: list[Action] = []
        for index in indices:
            self._answered.discard(self._sessions.pop(index, 0))
            actions += [Disconnect(index), Deliver(FrontEndLeft(index))]
        return actions

    def _greet(self, rank: int, indices: Iterable[int]) -> list[Action]:
        asks = self._ask_until is not None
        return [
            Greet(
                index,
                RouteHello(rank, self._incarnation, self._sessions[index], asks, self._drains),
            )
            for index in indices
        ]


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
        return self._links.update(self.rank, epoch, entries, now)

    # -- time ------------------------------------------------------------------------------------

    def _due(self, now: float) -> list[Action]:
        """Return what is to be sent by now, and whether the engine can be counted on."""
        actions: list[Action] = [Register(message) for message in self._membership.tick(now)]
        actions += self._links.tick(self.rank, now)
        unconfirmed = self._links.take_unconfirmed(now)
        if unconfirmed is not None:
            actions.append(Announce(unconfirmed))
        is_joining = self._membership.epoch is None
        self.deadline = now + (HELLO_INTERVAL if is_joining else self._links.wait)
        return actions
