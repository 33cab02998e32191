"""Messages published by the coordinator to engines and front ends, and their reports to it."""

from typing import Literal

import msgspec

from engine.shared.messages.adapters import (
    AdapterRequest,
    AdaptersInUse,
    AdaptersView,
    AdapterTable,
)
from engine.shared.messages.fleet import FleetOrder, FleetRequest
from engine.shared.messages.membership import (
    EngineSetup,
    FrontEndEntry,
    GroupMember,
    ProcessUse,
)
from engine.shared.messages.outputs import EngineStats, Received
from engine.shared.messages.wire import Message

# -- back publish: coordinator -> engines --------------------------------------------------------


class FrontEnds(Message, frozen=True):
    """The current front ends; engines connect to new ones and disconnect from all others."""

    epoch: int
    front_ends: list[FrontEndEntry]
    group: str = ""
    """The addressed engine group; the same in the other orders."""


class StartDpWave(Message, frozen=True):
    """Paused engines of the group start stepping.

    `excluded_rank` has already received the request itself: an optimization only, -1 for none.
    Held engines obey only a `hold_epoch` that is newer than theirs.
    """

    wave: int
    excluded_rank: int
    hold_epoch: int = 0
    topology: int = 0
    group: str = ""


class FormGroup(Message, frozen=True):
    """The engines that form the next group of collectives; `topology` only grows.

    Without an address: leave the current group, if any, and prepare for this one. With an address,
    sent once all members are prepared: rendezvous there.
    """

    topology: int
    members: list[GroupMember]
    """By position in the group, the leader first."""
    address: str = ""
    group: str = ""


class ApplyAdapterTable(Message, frozen=True, tag="HoldAdapters"):
    """The adapters that engines have to load; ignored by an engine that knows a newer table."""

    epoch: int
    table: AdapterTable
    group: str = ""


class ApplyFleetOrder(Message, frozen=True, tag="FollowFleet"):
    """The operators' current order; ignored by an engine that knows a newer one."""

    epoch: int
    order: FleetOrder
    group: str = ""


GroupOrder = FrontEnds | StartDpWave | FormGroup | ApplyAdapterTable | ApplyFleetOrder


# -- back output: engines -> coordinator ---------------------------------------------------------


class WaveComplete(Message, frozen=True):
    """Sent by rank 0 of a lockstep group: no engine has work, the group paused after `wave`.

    With an odd `hold_epoch` the group is held: only a newer hold epoch resumes it.
    """

    rank: int
    incarnation: int
    wave: int
    hold_epoch: int = 0
    topology: int = 0


class StartWave(Message, frozen=True):
    """An engine has started `wave`: its peers have to run too.

    Every engine of a lockstep group sends this when it starts, for whatever reason, so that the
    coordinator knows who follows. Repeated while no peer joins.
    """

    rank: int
    incarnation: int
    wave: int
    hold_epoch: int = 0
    topology: int = 0


EngineReport = EngineStats | WaveComplete | StartWave


# -- front publish: coordinator <-> front ends ---------------------------------------------------


class EngineEntry(msgspec.Struct, frozen=True, array_like=True):
    """One engine in the cluster view. `stats` is None until its first report."""

    rank: int
    incarnation: int
    ready: bool
    host: str
    restarts: int
    """Number of earlier incarnations of this rank seen by the coordinator."""
    setup: EngineSetup | None
    stats: EngineStats | None
    draining: bool = False
    """An engine that is neither ready nor draining is starting."""
    adapters: list[str] = []
    """Versions of its loaded adapters."""


AbsenceReason = Literal["not_joined", "died", "silent", "drained", "refused"]
"""Why an engine is missing: it never joined; its supervisor reported its death; it timed out;
it was drained; its weights differed from the others'."""


class MissingEngine(msgspec.Struct, frozen=True, array_like=True):
    """An expected engine that is not a member; see `coordinator.placement`."""

    rank: int
    reason: AbsenceReason
    age: float
    """Seconds since the coordinator first missed it."""


class ProcessEntry(msgspec.Struct, frozen=True, array_like=True):
    """One process of the cluster."""

    name: str
    """As in its log: "coordinator", "engine 3", "api 0"."""
    host: str
    version: str
    protocol: int
    use: ProcessUse | None
    """None before its first heartbeat, and for processes that predate the field."""


class TenantUse(msgspec.Struct, frozen=True, array_like=True):
    """A tenant's work in flight in the front ends that share one admission table."""

    table: str
    """Name of the table: shared by a node, or private to a front end."""
    tenant: int
    sequences: int
    tokens: int
    """Waiting prompt tokens."""


class ClusterView(Message, frozen=True):
    """The whole state of the cluster as the coordinator knows it.

    `version` grows with every publication of one epoch.
    """

    epoch: int
    version: int
    wave: int
    running: bool
    engines: list[EngineEntry]
    num_front_ends: int
    wakeups_total: dict[str, int] = {}
    """How often the engines were woken, by source: "front_end" or "engine"."""
    group: str = ""
    """The engine group of this view; other groups' front ends ignore it."""
    expected: int = 0
    """Number of expected engines; if none is configured, the members plus the missing ones."""
    missing: list[MissingEngine] = []
    adapters: AdaptersView | None = None
    """None if no engine supports adapters, or the state is not known yet."""
    descriptors: tuple[int, int] = (0, 0)
    """Open file descriptors of the coordinator and their limit; 0: unknown."""
    fleet: FleetOrder | None = None
    """The operators' current order; None before the first."""
    tenants: list[TenantUse] | None = None
    """Usage per tenant where limits are set; None: not counted by this coordinator."""
    processes: list[ProcessEntry] = []
    """The coordinator and its members."""


class LoadChange(msgspec.Struct, frozen=True, array_like=True):
    """The part of an engine's new stats that routing needs; the rest is unchanged."""

    rank: int
    version: int
    wave: int
    step: int
    waiting: int
    running: int
    kv_usage: float
    queued_prefill_tokens: int
    received: list[Received]
    """Only entries of front ends that have sent more since the last view."""


class ViewChange(Message, frozen=True):
    """The changes since view number `after`.

    For front ends with `Hello.takes_changes`. One that missed the earlier view subscribes again to
    get a whole one.
    """

    after: int
    view: ClusterView
    """Contains only engines and processes that are new or changed in more than their load."""
    loads: list[LoadChange]
    left: list[int]
    """Ranks of the engines that have left."""
    processes_left: list[str]


class WakeUp(Message, frozen=True):
    """A front end sent a request to `rank` while its view showed `wave` as paused."""

    front_end: int
    rank: int
    wave: int
    group: str = ""


class TenantsInUse(Message, frozen=True):
    """Usage of a front end's tenants; the newest message replaces earlier ones."""

    front_end: int
    incarnation: int
    tenants: list[TenantUse]
    group: str = ""


FrontEndNotice = WakeUp | AdapterRequest | AdaptersInUse | FleetRequest | TenantsInUse
