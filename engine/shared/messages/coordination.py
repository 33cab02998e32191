"""What the coordinator publishes, to engines and to front ends, and what they report to it."""

from typing import Literal

import msgspec

from engine.shared.messages.adapters import (
    AdapterSheet,
    AdaptersInUse,
    AdaptersView,
    AdapterWish,
)
from engine.shared.messages.fleet import FleetOrder, FleetWish
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
    """The front ends that are there now; engines connect to new ones and drop the others."""

    epoch: int
    front_ends: list[FrontEndEntry]
    group: str = ""
    """The engine group that this is for; the same in the other orders."""


class StartDpWave(Message, frozen=True):
    """Paused engines of the group start stepping.

    `excluded_rank` already knows (it was sent the request): an optimization only, -1 for none.
    Held engines obey only a `hold_epoch` that is newer than theirs.
    """

    wave: int
    excluded_rank: int
    hold_epoch: int = 0
    topology: int = 0
    group: str = ""


class FormGroup(Message, frozen=True):
    """The engines that hold collectives together from now on; `topology` only grows.

    Without an address: leave the group before it, if any, and prepare for this one. With an
    address, which comes when all members have prepared: meet there.
    """

    topology: int
    members: list[GroupMember]
    """By position in the group, the leader first."""
    address: str = ""
    group: str = ""


class HoldAdapters(Message, frozen=True):
    """The adapters that engines have from now on; one that knows a newer sheet ignores it."""

    epoch: int
    sheet: AdapterSheet
    group: str = ""


class FollowFleet(Message, frozen=True):
    """What operators want of all engines; one that knows a newer order ignores it."""

    epoch: int
    order: FleetOrder
    group: str = ""


GroupOrder = FrontEnds | StartDpWave | FormGroup | HoldAdapters | FollowFleet


# -- back output: engines -> coordinator ---------------------------------------------------------


class WaveComplete(Message, frozen=True):
    """Rank 0 of a lockstep group: nobody has work, the group paused at the end of `wave`.

    With an odd `hold_epoch` the group is held: only a newer hold epoch makes it run again.
    """

    rank: int
    incarnation: int
    wave: int
    hold_epoch: int = 0
    topology: int = 0


class StartWave(Message, frozen=True):
    """An engine runs `wave` from now on: its peers have to run too.

    Every engine of a lockstep group says so when it starts, whatever made it start, so that the
    coordinator knows who follows. Told again while nobody joins.
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
    """How many earlier incarnations of this rank the coordinator has seen."""
    setup: EngineSetup | None
    stats: EngineStats | None
    draining: bool = False
    """Whether it drains; an engine that is neither ready nor draining is starting."""
    adapters: list[str] = []
    """Versions of the adapters that it has."""


AbsenceReason = Literal["not_joined", "died", "silent", "drained", "refused"]
"""Why an engine is missing: it never joined; its supervisor saw it die; it was silent for too
long; it was drained; its weights differed from the others'."""


class MissingEngine(msgspec.Struct, frozen=True, array_like=True):
    """An engine that is expected and not there; see `coordinator.placement`."""

    rank: int
    reason: AbsenceReason
    age: float
    """Seconds for which the coordinator has missed it."""


class ProcessEntry(msgspec.Struct, frozen=True, array_like=True):
    """One process of the cluster."""

    name: str
    """As in its log: "coordinator", "engine 3", "api 0"."""
    host: str
    version: str
    protocol: int
    use: ProcessUse | None
    """None before its first heartbeat, and for processes that are older than the field."""


class TenantUse(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant has under way in the front ends that share one admission table."""

    table: str
    """Name of the table: a node's, or that of a front end alone."""
    tenant: int
    sequences: int
    tokens: int
    """Prompt tokens that wait."""


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
    """The engine group that this shows; front ends of others ignore it."""
    expected: int = 0
    """How many engines are expected; if nothing says so, those that are there or were lost."""
    missing: list[MissingEngine] = []
    adapters: AdaptersView | None = None
    """None if no engine has any, or the coordinator does not know yet."""
    descriptors: tuple[int, int] = (0, 0)
    """How many file descriptors the coordinator has open and may have; 0: not known."""
    fleet: FleetOrder | None = None
    """What operators want of all engines; None before anybody has wished for anything."""
    tenants: list[TenantUse] | None = None
    """What tenants have under way, where limits for them are set; None: it does not count that."""
    processes: list[ProcessEntry] = []
    """The coordinator, and its members."""


class LoadChange(msgspec.Struct, frozen=True, array_like=True):
    """What routing needs of an engine's newer stats; the rest of them stays as it was told."""

    rank: int
    version: int
    wave: int
    step: int
    waiting: int
    running: int
    kv_usage: float
    queued_prefill_tokens: int
    received: list[Received]
    """From front ends that have sent more since."""


class ViewChange(Message, frozen=True):
    """What is new since the view number `after`, which `view` replaces.

    For front ends that say `Hello.takes_changes`. Whoever does not know the view before asks for
    a whole one, by subscribing again.
    """

    after: int
    view: ClusterView
    """Its engines and processes are those that are new or have changed in more than their load."""
    loads: list[LoadChange]
    left: list[int]
    """Ranks of the engines that have gone."""
    processes_left: list[str]


class WakeUp(Message, frozen=True):
    """A front end sent a request to `rank` while its view said paused in `wave`."""

    front_end: int
    rank: int
    wave: int
    group: str = ""


class TenantsInUse(Message, frozen=True):
    """What the tenants of a front end have under way; its newest word counts."""

    front_end: int
    incarnation: int
    tenants: list[TenantUse]
    group: str = ""


FrontEndNotice = WakeUp | AdapterWish | AdaptersInUse | FleetWish | TenantsInUse
