"""The coordinator's decisions about membership, publication and waking engines.

`CoordinatorState.handle(event, now)` is the only entry point; it returns the actions that the shell
in `coordinator.process` carries out. It has no sockets and no clock. All of its state can be
rebuilt from its peers: after a restart they notice the new epoch and register again.
"""

import dataclasses
from dataclasses import dataclass
from typing import assert_never

from msgspec.structs import replace

from coordinator.adapters import AdapterRegistry, FleetOrders
from coordinator.agreement import (
    SIZE_KEY,
    differing_model,
    refused_by_weights,
)
from coordinator.events import (
    Action,
    Event,
    FromMember,
    Notice,
    PublishOrder,
    PublishView,
    Reply,
    Subscribed,
    Tick,
)
from coordinator.formation import GroupFormation
from coordinator.members import Members, NumberAssignment
from coordinator.placement import ExpectedEngines, Placement
from coordinator.publication import Publication, ViewChanges
from coordinator.tenants import TenantUsage
from coordinator.wave import NEVER, IndependentWave, LockstepWave
from engine.shared.messages import (
    AbsenceReason,
    AdapterRequest,
    AdaptersInUse,
    AdapterTable,
    ApplyAdapterTable,
    ApplyFleetOrder,
    ClusterView,
    Draining,
    EngineStats,
    FleetRequest,
    FrontEnds,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    MemberKind,
    MemberMessage,
    NodeReport,
    Ready,
    Refused,
    StartWave,
    TenantsInUse,
    WakeUp,
    WaveComplete,
    Welcome,
)
from engine.shared.version import SWELL_VERSION

MISSING_INTERVAL = 10.0
"""Seconds between two log lines about planned engines that have not joined."""

EXPIRY_CHECKS = 50
"""Number of checks for silent members per member timeout."""

BURST_ENGINES, BURST_INTERVAL = 20, 0.001
"""Urgent views are at least BURST_INTERVAL seconds apart for every BURST_ENGINES engines: the
cost of a view grows with the engines, and a burst of joins is published together."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorParameters:
    """Constants of one coordinator process; times in seconds."""

    epoch: int
    front_publish: str
    back_publish: str
    back_output: str
    publish_interval: float
    publish_idle_interval: float
    member_timeout: float
    has_predecessors: bool = True
    """Whether members of a previous coordinator may still be alive."""
    expected_engines: int | None = None
    """Number of expected engines; None: as many as the nodes' supervisors run."""
    planned_engines: int | None = None
    """Number that the supervisors will run once all nodes have joined; None: unknown."""


class CoordinatorState:
    """State of one engine group, changed only by events."""

    def __init__(self, parameters: CoordinatorParameters) -> None:
        self._parameters = parameters
        self._members = Members()
        self._wave: IndependentWave | LockstepWave = IndependentWave()
        self._formation: GroupFormation | None = None
        self._placement = Placement(parameters.member_timeout)
        self._expected = ExpectedEngines(parameters.expected_engines, parameters.planned_engines)
        self._publication = Publication(
            parameters.publish_interval, parameters.publish_idle_interval
        )
        self._changes = ViewChanges()
        self._has_newcomers = False
        """Front ends have subscribed since the last view and need a whole one."""
        self._order_due = self._expire_at = float("-inf")
        grace = parameters.member_timeout if parameters.has_predecessors else 0.0
        self._numbers = NumberAssignment(grace)
        self._log_missing_at = float("-inf")
        self._adapters = AdapterRegistry()
        self._tenants = TenantUsage()
        self._ordered_table: AdapterTable | None = None
        self._fleet = FleetOrders()

    def expect(self, number: int | None) -> None:
        """Change the number of expected engines; None: as many as the supervisors run."""
        self._parameters = dataclasses.replace(self._parameters, expected_engines=number)
        self._expected.number = self._expected.planned if number is None else number

    def start(self, now: float) -> None:
        """Record when the coordinator started; only the first call, or event, counts."""
        self._numbers.start(now)

    # -- entry point -----------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event at `now` (seconds, monotonic) and return the resulting actions."""
        actions: list[Action] = []
        self._numbers.start(now)
        match event:
            case FromMember(sender, message):
                actions += self._from_member(sender, message, now)
            case EngineStats() | WaveComplete() | StartWave():
                self._reported(event)
            case WakeUp():
                self._publication.changed |= self._wave.notice(event)
            case AdapterRequest():
                self._adapters.handle_request(event)
            case FleetRequest():
                actions += self._order_fleet(self._fleet.handle_request(event))
            case AdaptersInUse(front_end, incarnation):
                self._adapters.known[front_end, incarnation] = event
            case TenantsInUse(front_end, incarnation):
                is_member = (front_end, incarnation) in self._members.all_front_ends
                self._publication.changed |= is_member and self._tenants.take(event)
            case Subscribed("engine"):
                actions += self._standing_orders()
            case Subscribed():
                self._has_newcomers = self._publication.urgent = True
            case Tick():
                actions += self._tick(now)
            case _:
                assert_never(event)
        if not isinstance(event, EngineStats):
            actions += self._order_adapters()
        actions += self._form_group(now)
        actions += [PublishOrder(order) for order in self._wave.orders(now)]
        return actions + self._publish_if_due(now)

    def next_deadline(self, now: float) -> float:
        """Return the latest time at which `Tick` has to be handled."""
        return min(
            self._publication.deadline(now),
            now + self._parameters.member_timeout / 4,
            self._wave.orders_due,
            self._formation.orders_due if self._formation is not None else NEVER,
        )

    # -- membership ------------------------------------------------------------------------------

    def _from_member(
        self, sender: bytes, message: MemberMessage | NodeReport, now: float
    ) -> list[Action]:
        match message:
            case NodeReport():
                if message.request is not None and message.request.size is not None:
                    self._expected.planned = None  # an operator has chosen another number
                return self._placement.report(sender, message, now)
            case Hello():
                return self._hello(sender, message, now)
            case Ready() | Heartbeat() | Draining():
                return self._alive(sender, message, now)
            case Goodbye():
                member = self._members.find_leaving(message)
                if member is None:
                    return []
                if member.draining and self._formation is not None:
                    self._formation.left(member.index)
                reason: AbsenceReason = "drained" if member.draining else "died"
                return self._remove(message.kind, member.index, "said goodbye", reason)

    @property
    def is_empty(self) -> bool:
        """Whether there are no members, and no node has reported."""
        return self._members.is_empty and self._placement.is_empty

    def knows(self, message: Hello | Ready | Heartbeat | Draining) -> bool:
        """Return whether the sender of a message is a member."""
        return self._members.find(message) is not None

    def _hello(self, sender: bytes, hello: Hello, now: float) -> list[Action]:
        refusal = self._exceeds_plan(hello) or self._members.refusal(hello)
        if refusal is not None:
            return [Reply(sender, refusal)]
        members = self._members.of(hello.kind)
        assigned = {index: member.incarnation for index, member in members.items()}
        index = self._numbers.number_for(hello, assigned, now)
        if isinstance(index, Refused):
            return [Reply(sender, index)]
        actions = [] if assigned.get(index) == hello.incarnation else self._join(hello, index, now)
        self._publication.urgent = True
        self._adapters.adopt_newer(hello.adapters)
        actions += self._order_fleet(self._fleet.adopt_newer(hello.fleet))
        return [*actions, Reply(sender, self._welcome(hello, index))]

    def _exceeds_plan(self, hello: Hello) -> Refused | None:
        number, planned = self._expected.number or 0, self._expected.planned
        if planned is None or hello.kind != "engine" or hello.given or hello.index < number:
            return None
        return Refused(
            f"data_parallel_rank is {hello.index} here, but the head has --data-parallel-size "
            f"{number}: ranks are 0 to {number - 1}. Start the head with a larger size, or this "
            "node with a lower --data-parallel-start-rank or --data-parallel-rank",
            field="data_parallel_rank",
        )

    def _join(self, hello: Hello, index: int, now: float) -> list[Action]:
        self._members.add(hello, index, now)
        name = f"{hello.kind.replace('_', ' ')} {index}"
        joined = Notice(f"{name} joined from {hello.host}, pid {hello.pid}, Swell {hello.version}")
        if hello.kind == "front_end":
            return [joined, PublishOrder(self._front_ends_order())]
        actions: list[Action] = [joined]
        for number, member in list(self._members.front_ends.items()):
            field = differing_model(member.hello.group_config, hello.group_config)
            if field is not None:
                value, engines = member.hello.group_config.get(field), hello.group_config[field]
                why = f"was removed: its {field} is {value!r}, but the engines' is {engines!r}"
                actions += self._remove("front_end", number, why)
        self._choose_wave(hello)
        self._wave.adopt(hello.wave)
        return actions

    def _welcome(self, hello: Hello, index: int) -> Welcome:
        parameters, is_engine = self._parameters, hello.kind == "engine"
        return Welcome(
            epoch=parameters.epoch,
            index=index,
            wave=self._wave.wave,
            publish_address=parameters.back_publish if is_engine else parameters.front_publish,
            output_address=parameters.back_output if is_engine else "",
            front_ends=self._members.front_end_entries() if is_engine else [],
            protocol=hello.protocol,
            version=SWELL_VERSION,
            adapters=self._adapters.table if is_engine else None,
            fleet=self._fleet.order if is_engine else None,
        )

    def _choose_wave(self, hello: Hello) -> None:
        # All engines agree on this setting; it changes only when the cluster has no engines.
        lockstep = hello.group_config.get("lockstep") == "true"
        if lockstep != isinstance(self._wave, LockstepWave):
            wave = self._wave.wave
            self._wave = LockstepWave() if lockstep else IndependentWave()
            self._wave.adopt(wave)
            self._formation = None
            if lockstep:
                self._formation = GroupFormation(
                    size=int(hello.group_config.get(SIZE_KEY, "1")),
                    regroup="wait" if hello.group_config.get("regroup") == "wait" else "shrink",
                    grace=self._parameters.member_timeout,
                )

    def _alive(
        self, sender: bytes, message: Ready | Heartbeat | Draining, now: float
    ) -> list[Action]:
        member = self._members.find(message)
        epoch = self._parameters.epoch
        if member is None:
            return [Reply(sender, HeartbeatAck(epoch, known=False))]
        member.last_seen = now
        member.group_status = message.group_status
        member.process = replace(member.process, use=message.use)
        if message.kind == "engine":
            engine = message.index, message.incarnation
            self._adapters.held[engine] = {each.serial: each for each in message.adapters}
        actions: list[Action] = [Reply(sender, HeartbeatAck(epoch, known=True))]
        if isinstance(message, Draining) and not member.draining:
            member.draining, member.ready = True, False
            self._engines_changed()
            actions.append(Notice(f"{message.kind.replace('_', ' ')} {message.index} drains"))
        if isinstance(message, Ready) and member.ready and message.setup is not None:
            member.setup = message.setup  # its weights may have been replaced
        if isinstance(message, Ready) and not member.ready and not member.draining:
            others = self._members.engines.items()
            setups = {rank: each.setup for rank, each in others if each.setup is not None}
            refusal = refused_by_weights(
                message.index, message.setup, setups, self._fleet.order.weights
            )
            if refusal is not None:
                removed = self._remove(message.kind, message.index, "was refused", "refused")
                return [*removed, Reply(sender, refusal)]
            member.ready = True
            member.setup = message.setup
            self._engines_changed()
            actions.append(Notice(f"{message.kind.replace('_', ' ')} {message.index} is ready"))
        return actions

    def _remove(
        self, kind: MemberKind, index: int, why: str, reason: AbsenceReason = "silent"
    ) -> list[Action]:
        member = self._members.of(kind).pop(index)
        if kind == "engine":
            self._adapters.held.pop((index, member.incarnation), None)
        self._engines_changed()
        actions: list[Action] = [Notice(f"{kind.replace('_', ' ')} {index} {why}")]
        if kind == "front_end":
            self._tenants.keep(self._members.all_front_ends)
            actions.append(PublishOrder(self._front_ends_order()))
        else:
            self._expected.left(index, reason)
        return actions

    def _engines_changed(self) -> None:
        self._publication.urgent = True
        self._wave.take_members(frozenset(rank for rank, _ in self._members.ready_engines))

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if now >= self._expire_at:
            timeout = self._parameters.member_timeout
            self._expire_at = now + timeout / EXPIRY_CHECKS
            for kind, index in self._members.silent(now, timeout):
                actions += self._remove(kind, index, "has been silent for too long")
        actions += self._repeat_order(now)
        return actions + self._placement.tick(now) + self._log_missing(now)

    # -- adapters --------------------------------------------------------------------------------

    def _order_adapters(self) -> list[Action]:
        ready, front_ends = self._members.ready_engines, self._members.all_front_ends
        self._publication.urgent |= self._adapters.advance(ready, front_ends)
        table = self._adapters.table
        if table is None or table is self._ordered_table:
            return []
        self._ordered_table = table
        self._publication.urgent = True
        return [PublishOrder(ApplyAdapterTable(self._parameters.epoch, table))]

    def _order_fleet(self, is_new: bool) -> list[Action]:
        self._publication.urgent |= is_new
        order = ApplyFleetOrder(self._parameters.epoch, self._fleet.order)
        return [PublishOrder(order)] if is_new else []

    # -- lockstep groups ---------------------------------------------------------------------------

    def _form_group(self, now: float) -> list[Action]:
        if self._formation is None:
            return []
        known = self._formation.plan
        orders = self._formation.orders(self._members.engines, now)
        actions: list[Action] = [PublishOrder(order) for order in orders]
        for order in orders:
            if known is None or order.topology != known.topology:
                ranks = ", ".join(str(member.rank) for member in order.members)
                actions.append(Notice(f"engines {ranks} form group {order.topology}"))
        return actions

    # -- stats and waves -------------------------------------------------------------------------

    def _reported(self, report: EngineStats | WaveComplete | StartWave) -> None:
        member = self._members.engines.get(report.rank)
        if member is None or member.incarnation != report.incarnation:
            return
        if not isinstance(report, EngineStats):
            self._publication.urgent |= self._wave.report(report)
        elif member.stats is None or member.stats.version < report.version:
            member.stats = report
            if not self._publication.changed:
                self._publication.changed = not self._members.is_balanced_externally
            self._publication.urgent |= self._wave.stats(report)

    # -- publication -----------------------------------------------------------------------------

    def _front_ends_order(self) -> FrontEnds:
        return FrontEnds(self._parameters.epoch, self._members.front_end_entries())

    def _repeat_order(self, now: float) -> list[Action]:
        """Resend the standing orders periodically, in case engines missed them."""
        if now < self._order_due:
            return []
        self._order_due = now + self._parameters.publish_idle_interval
        return self._standing_orders()

    def _standing_orders(self) -> list[Action]:
        orders: list[Action] = [PublishOrder(self._front_ends_order())]
        if self._adapters.table is not None:
            orders.append(
                PublishOrder(ApplyAdapterTable(self._parameters.epoch, self._adapters.table))
            )
        if self._fleet.order.revision:
            orders.append(PublishOrder(ApplyFleetOrder(self._parameters.epoch, self._fleet.order)))
        return orders

    def _publish_if_due(self, now: float) -> list[Action]:
        engines = len(self._members.engines)
        self._publication.urgent_interval = engines // BURST_ENGINES * BURST_INTERVAL
        if not self._publication.take_due(now):
            return []
        view, change = self._with_missing(self.view(), now), None
        if self._members.accept_changes and not self._has_newcomers:
            change = self._changes.since(view)
        if change is None:
            self._changes.record_full(view)
        self._has_newcomers = False
        self._publication.changed = bool(self._changes.partly_sent)
        return [PublishView(view, change)]

    def _with_missing(self, view: ClusterView, now: float) -> ClusterView:
        expected = self._expected
        if self._parameters.expected_engines is None:
            expected.follow(self._placement.total_target)
        missing = expected.missing([entry.rank for entry in view.engines], now)
        number = expected.number
        if number is None:
            number = len(view.engines) + len(missing)
        return replace(view, expected=number, missing=missing)

    def _log_missing(self, now: float) -> list[Action]:
        if self._expected.planned is None or now < self._log_missing_at:
            return []
        self._log_missing_at = now + MISSING_INTERVAL
        view = self._with_missing(self.view(), now)
        if not view.missing or not view.engines:
            return []
        present = ", ".join(f"{each.rank} on {each.host}" for each in view.engines)
        missing = ", ".join(
            f"{each.rank} ({each.reason.replace('_', ' ')}, for {each.age:.0f} s)"
            for each in view.missing
        )
        return [
            Notice(
                f"{len(view.engines)} of {view.expected} engines are present: {present}. "
                f"Missing: {missing}"
            )
        ]

    def view(self) -> ClusterView:
        """Return the current view of the cluster."""
        both = (self._members.engines, self._members.front_ends)
        return ClusterView(
            epoch=self._parameters.epoch,
            version=self._publication.version,
            wave=self._wave.wave,
            running=self._wave.running,
            engines=self._members.engine_entries(self._adapters.versions),
            num_front_ends=sum(each.ready for each in self._members.front_ends.values()),
            wakeups_total=dict(self._wave.wakeups),
            adapters=self._adapters.view,
            fleet=self._fleet.order if self._fleet.order.revision else None,
            tenants=self._tenants.sums,
            processes=[each.process for members in both for _, each in sorted(members.items())],
        )
