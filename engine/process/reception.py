"""The engine receiver's decisions: a state machine without I/O.

It owns the engine's membership and its links to front ends. `handle` takes one event and returns
the receiver's actions in order; `deadline` is the latest time for a `Tick`.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.events import FrontEndJoined, FrontEndLeft, InboxItem, Rejoined, Stop, Welcomed
from engine.shared.membership import HELLO_INTERVAL, Joined, Membership, Rejected
from engine.shared.messages import (
    AbortRequests,
    AdapterLoadResult,
    AdapterTable,
    AddRequest,
    ApplyAdapterTable,
    ApplyFleetOrder,
    CoordinatorReply,
    EngineInput,
    EngineSetup,
    FleetOrder,
    FormGroup,
    FrontEndEntry,
    FrontEnds,
    GroupOrder,
    GroupStatus,
    HeartbeatAck,
    KvBlocksQuery,
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

CONFIRMATION_INTERVAL = 0.02
"""Seconds between hellos while waiting for front ends to confirm that they route here."""

# -- events, in addition to received messages ----------------------------------------------------


class Serve(NamedTuple):
    """The engine has loaded its model: notify the coordinator and the front ends."""

    setup: EngineSetup


class StartDrain(NamedTuple):
    """The engine drains: notify the coordinator and the front ends."""


class SetGroupStatus(NamedTuple):
    """The engine's state in its lockstep group has changed: notify the coordinator."""

    status: GroupStatus


class SetAdapters(NamedTuple):
    """The engine has this adapter table and these adapters: notify the coordinator."""

    adapter_table: AdapterTable
    held: list[AdapterLoadResult]


class Leave(NamedTuple):
    """The engine stops."""


class Tick(NamedTuple):
    """Time has passed."""


Command = Serve | StartDrain | SetGroupStatus | SetAdapters | Leave
"""Events from the engine's loop."""

Event = CoordinatorReply | GroupOrder | EngineInput | Command | Tick

# -- actions -------------------------------------------------------------------------------------


class Register(NamedTuple):
    """Send this on the registration socket."""

    message: MemberMessage


class Follow(NamedTuple):
    """Subscribe to the coordinator's orders and connect for reports, replacing earlier
    connections."""

    orders_address: str
    reports_address: str


class Connect(NamedTuple):
    """Open the connections to and from a front end."""

    entry: FrontEndEntry


class Disconnect(NamedTuple):
    """Close the connections to and from a front end."""

    front_end: int


class SendHello(NamedTuple):
    """Send a hello on the request connection of a front end."""

    front_end: int
    hello: RouteHello


class Deliver(NamedTuple):
    """Put this into the loop's inbox."""

    item: InboxItem


class Supersede(NamedTuple):
    """Abort a group with a smaller number, to free a loop that waits in it."""

    topology: int


class Announce(NamedTuple):
    """Report to the supervisor that front ends route to the engine, except for these."""

    unconfirmed: list[int]


class Close(NamedTuple):
    """Close everything and end the thread."""


Action = (
    Register | Follow | Connect | Disconnect | SendHello | Deliver | Supersede | Announce | Close
)


@dataclass(eq=False)
class FrontEndLinks:
    """The connections of one engine process to all front ends within its scope.

    Hellos are repeated as keep-alives of the request and output connections; a lost one costs an
    interval. An engine that has just become ready asks in its hellos which front ends already route
    to it. Its supervisor waits for the answers before it stops another engine, so that no front end
    is left without one.

    Args:
        incarnation: of the engine.
        node: name of the engine's node.
        grace: seconds for which front ends missing from a restarted coordinator's list are kept,
            and for which front ends are asked for confirmation.
        interval: seconds between hellos.
    """

    incarnation: int
    node: str
    grace: float
    interval: float

    def __post_init__(self) -> None:
        self._roster: Roster[FrontEndEntry] = Roster(self.grace)
        self._sessions: dict[int, int] = {}
        self._num_sessions = 0
        self._next_hello_at = 0.0
        self._confirm_until: float | None = None
        self._drains = False
        self._answered: set[int] = set()

    def serve(self, now: float) -> None:
        """Start asking all front ends whether they route to the engine, which now serves."""
        self._confirm_until = now + self.grace
        self._next_hello_at = now

    def drain(self, now: float) -> None:
        """Notify all front ends that the engine accepts no new requests."""
        self._drains = True
        self._next_hello_at = now

    def answered(self, answer: RouteTaken) -> None:
        """Record that a front end routes to the engine."""
        self._answered.add(answer.session)

    def take_unconfirmed(self, now: float) -> list[int] | None:
        """Return, once, the front ends that do not route to a serving engine yet.

        None before it serves, while waiting for confirmations, and once the result was returned.
        """
        if self._confirm_until is None:
            return None
        unconfirmed = [each for each, of in self._sessions.items() if of not in self._answered]
        if unconfirmed and now < self._confirm_until:
            return None
        self._confirm_until = None
        return unconfirmed

    @property
    def wait(self) -> float:
        """Maximum seconds until the next call of `tick`."""
        return self.interval if self._confirm_until is None else CONFIRMATION_INTERVAL

    def update(
        self, rank: int, epoch: int, entries: list[FrontEndEntry], now: float
    ) -> list[Action]:
        """Apply a complete list from the coordinator of `epoch`; `rank` is this engine's."""
        listed = {each.index: each for each in entries if each.scope.contains(rank, self.node)}
        change = self._roster.update(epoch, listed, now)
        actions = self._remove(change.left)
        for index in change.joined:
            self._num_sessions += 1
            self._sessions[index] = self._num_sessions
            # Outputs can follow a request immediately, so their connection has to be opened first.
            entry = listed[index]
            actions += [Connect(entry), Deliver(FrontEndJoined(index, entry.incarnation))]
        return actions + self._hellos(rank, change.joined)

    def tick(self, rank: int, now: float) -> list[Action]:
        """Return the actions that are due: expired front ends and hellos."""
        actions = self._remove(self._roster.expire(now))
        if now < self._next_hello_at:
            return actions
        self._next_hello_at = now + self.wait
        return actions + self._hellos(rank, self._sessions)

    def _remove(self, indices: Iterable[int]) -> list[Action]:
        actions: list[Action] = []
        for index in indices:
            self._answered.discard(self._sessions.pop(index, 0))
            actions += [Disconnect(index), Deliver(FrontEndLeft(index))]
        return actions

    def _hellos(self, rank: int, indices: Iterable[int]) -> list[Action]:
        wants_reply = self._confirm_until is not None
        return [
            SendHello(
                index,
                RouteHello(
                    rank, self.incarnation, self._sessions[index], wants_reply, self._drains
                ),
            )
            for index in indices
        ]


class Reception:
    """One engine's receiver without its sockets."""

    def __init__(self, membership: Membership, links: FrontEndLinks) -> None:
        self.deadline = float("-inf")
        """Latest time of the next `Tick` (seconds, monotonic)."""
        self.adapter_table: AdapterTable | None = None
        """The newest adapter table; read from any thread."""
        self._membership = membership
        self._links = links
        self._following: Follow | None = None
        self._refusal = ""

    @property
    def rank(self) -> int:
        """The engine's rank; -1 while unknown."""
        return self._membership.index

    def note_wave(self, wave: int) -> None:
        """Record the engine's wave, which is sent to a restarted coordinator; called by any
        thread."""
        self._membership.wave = max(self._membership.wave, wave)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle an event at `now`; return the actions. Unknown events are ignored."""
        match event:
            case AddRequest() | AbortRequests() | UtilityCall() | KvBlocksQuery():
                return [Deliver(event)]
            case Welcome() | Refused() | HeartbeatAck():
                actions = self._reply(event, now)
            case (
                StartDpWave() | FormGroup() | FrontEnds() | ApplyAdapterTable() | ApplyFleetOrder()
            ):
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
            case StartDrain():
                self._membership.drain()
                self._links.drain(now)
                actions = []
            case SetGroupStatus(status):
                self._membership.set_group_status(status)
                actions = []
            case SetAdapters(table, held):
                self._membership.adapters = table
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
            case ApplyAdapterTable(epoch, table):
                if epoch != self._membership.epoch:
                    return []
                self._note_table(table)
                return [Deliver(order)]
            case ApplyFleetOrder(epoch, fleet):
                return self._follow(fleet) if epoch == self._membership.epoch else []

    # -- the coordinator -------------------------------------------------------------------------

    def _reply(self, reply: CoordinatorReply, now: float) -> list[Action]:
        outcome = self._membership.receive(reply)
        if isinstance(outcome, Rejected):
            if outcome.serving and not outcome.replaced:
                if outcome.reason != self._refusal:
                    logger.error(
                        "the coordinator refused this engine, which keeps serving and "
                        "retries: %s", outcome.reason,
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
        self._note_table(welcome.adapters)
        follow = Follow(welcome.publish_address, welcome.output_address)
        if follow != self._following:
            self._following = follow
            actions.append(follow)
        if again:
            logger.warning("registered again: the coordinator did not know this process")
            actions.append(Deliver(Rejoined(welcome.wave)))
            if welcome.adapters is not None:
                actions.append(Deliver(ApplyAdapterTable(welcome.epoch, welcome.adapters)))
        else:
            logger.info("joined as rank %d", welcome.index)
            actions.append(Deliver(Welcomed(welcome.index, welcome.wave)))
        actions += self._follow(welcome.fleet)
        return actions + self._listed(welcome.epoch, welcome.front_ends, now)

    @property
    def ordered_weights(self) -> WeightsSource | None:
        """Weights that the engine has to load instead of its configured model."""
        order = self._membership.fleet
        return None if order is None else order.weights

    def _follow(self, order: FleetOrder | None) -> list[Action]:
        known = self._membership.fleet
        if order is None or order.revision <= (0 if known is None else known.revision):
            return []
        self._membership.fleet = order
        return [Deliver(order)]

    def _note_table(self, table: AdapterTable | None) -> None:
        known = self.adapter_table
        if table is not None and (known is None or table.revision > known.revision):
            self.adapter_table = table

    def _listed(self, epoch: int, entries: list[FrontEndEntry], now: float) -> list[Action]:
        if epoch != self._membership.epoch:
            return []
        return self._links.update(self.rank, epoch, entries, now)

    # -- time ------------------------------------------------------------------------------------

    def _due(self, now: float) -> list[Action]:
        """Return messages and actions that are due, and set the next deadline."""
        actions: list[Action] = [Register(message) for message in self._membership.tick(now)]
        actions += self._links.tick(self.rank, now)
        unconfirmed = self._links.take_unconfirmed(now)
        if unconfirmed is not None:
            actions.append(Announce(unconfirmed))
        is_joining = self._membership.epoch is None
        self.deadline = now + (HELLO_INTERVAL if is_joining else self._links.wait)
        return actions
