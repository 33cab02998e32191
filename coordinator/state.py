"""The coordinator's decisions: who is a member, what is published, who is woken.

`CoordinatorState.handle(event, now)` is the only way in; it returns the actions that the shell
in `coordinator.process` carries out. It has no sockets and no clock. Everything in it can be
told again by its peers: after a restart they notice the new epoch and register again.
"""

from dataclasses import dataclass, field
from typing import assert_never

from coordinator.agreement import (
    SIZE_KEY,
    differing_model,
    refused_by_protocol,
    refused_by_settings,
    refused_by_weights,
)
from coordinator.events import (
    Action,
    Event,
    FromMember,
    FromNode,
    Notice,
    PublishOrder,
    PublishView,
    Reply,
    Subscribed,
    Tick,
)
from coordinator.formation import GroupFormation, Standing
from coordinator.placement import Placement
from coordinator.wave import NEVER, GroupWave, IndependentWave, LockstepWave
from engine.shared.messages import (
    ClusterView,
    Draining,
    EngineEntry,
    EngineSetup,
    EngineStats,
    FrontEndAddresses,
    FrontEndEntry,
    FrontEnds,
    Goodbye,
    GroupStatus,
    Heartbeat,
    HeartbeatAck,
    Hello,
    MemberKind,
    MemberMessage,
    Ready,
    Refused,
    StartWave,
    WakeUp,
    WaveComplete,
    Welcome,
)
from engine.shared.scope import EVERYTHING, Scope
from engine.shared.version import PROTOCOL_VERSION, SWELL_VERSION


@dataclass(frozen=True, kw_only=True)
class CoordinatorParameters:
    """Fixed facts of one coordinator process; times in seconds."""

    epoch: int
    front_publish: str
    back_publish: str
    back_output: str
    publish_interval: float
    publish_idle_interval: float
    member_timeout: float


@dataclass
class _Member:
    """What is known of one engine or front end."""

    index: int
    incarnation: int
    host: str
    pid: int
    last_seen: float
    ready: bool = False
    draining: bool = False
    group_config: dict[str, str] = field(default_factory=dict)
    addresses: FrontEndAddresses | None = None
    scope: Scope = EVERYTHING
    setup: EngineSetup | None = None
    stats: EngineStats | None = None
    group_status: GroupStatus | None = None


class CoordinatorState:
    """Membership, stats table and publication schedule, around the group's wave."""

    def __init__(self, parameters: CoordinatorParameters) -> None:
        self._parameters = parameters
        self._members: dict[MemberKind, dict[int, _Member]] = {"engine": {}, "front_end": {}}
        self._restarts: dict[int, int] = {}
        self._last_incarnation: dict[int, int] = {}
        self._wave: GroupWave = IndependentWave()
        self._formation: GroupFormation | None = None
        self._placement = Placement(parameters.member_timeout)
        self._version = 0
        self._changed = False
        self._urgent = False
        self._last_published: float | None = None
        self._order_due = float("-inf")

    # -- the one way in --------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at `now` (seconds, monotonic) and return what has to be done."""
        actions: list[Action] = []
        match event:
            case FromNode(sender, report):
                actions += self._placement.report(sender, report, now)
            case FromMember(sender, message):
                actions += self._from_member(sender, message, now)
            case EngineStats():
                self._stats(event)
            case WaveComplete() | StartWave():
                self._wave_report(event)
            case WakeUp():
                self._changed |= self._wave.notice(event)
            case Subscribed(kind):
                actions += self._subscribed(kind)
            case Tick():
                actions += self._expire(now) + self._repeat_order(now) + self._placement.tick(now)
            case _:
                assert_never(event)
        actions += self._form_group(now)
        actions += [PublishOrder(order) for order in self._wave.orders(now)]
        return actions + self._publish_if_due(now)

    def next_deadline(self, now: float) -> float:
        """Return when `Tick` has to be handled at the latest."""
        if self._last_published is None:
            return now
        interval = (
            self._parameters.publish_interval
            if self._changed
            else self._parameters.publish_idle_interval
        )
        return min(
            self._last_published + interval,
            now + self._parameters.member_timeout / 4,
            self._wave.orders_due,
            self._formation.orders_due if self._formation is not None else NEVER,
        )

    # -- membership ------------------------------------------------------------------------------

    def _from_member(self, sender: bytes, message: MemberMessage, now: float) -> list[Action]:
        match message:
            case Hello():
                return self._hello(sender, message, now)
            case Ready() | Heartbeat() | Draining():
                return self._alive(sender, message, now)
            case Goodbye():
                return self._goodbye(message)

    def _goodbye(self, message: Goodbye) -> list[Action]:
        for index, member in self._members[message.kind].items():
            if member.incarnation == message.incarnation and message.index in (index, -1):
                if member.draining and self._formation is not None:
                    self._formation.left(index)
                return self._remove(message.kind, index, "said goodbye")
        return []

    def _find(self, message: Ready | Heartbeat | Draining) -> _Member | None:
        member = self._members[message.kind].get(message.index)
        return member if member and member.incarnation == message.incarnation else None

    def _hello(self, sender: bytes, hello: Hello, now: float) -> list[Action]:
        members = self._members[hello.kind]
        index = self._index_for(hello)
        refusal = refused_by_protocol(hello.protocol, hello.version)
        refusal = refusal or self._why_refused(hello, index)
        if refusal is not None:
            return [Reply(sender, refusal)]
        actions: list[Action] = []
        held = members.get(index)
        if held is None or held.incarnation != hello.incarnation:
            members[index] = _Member(
                index, hello.incarnation, hello.host, hello.pid, now,
                group_config=hello.group_config, addresses=hello.addresses, scope=hello.scope,
            )  # fmt: skip
            name = f"{hello.kind.replace('_', ' ')} {index}"
            actions.append(
                Notice(f"{name} joined from {hello.host}, pid {hello.pid}, Swell {hello.version}")
            )
            if hello.kind == "engine":
                actions += self._dismiss_other_models(hello)
                self._count_restart(index, hello.incarnation)
                self._choose_wave(hello)
                self._wave.adopt(hello.wave)
            else:
                actions.append(PublishOrder(self._front_ends_order()))
        self._urgent = True
        is_engine = hello.kind == "engine"
        welcome = Welcome(
            epoch=self._parameters.epoch,
            index=index,
            wave=self._wave.wave,
            publish_address=(
                self._parameters.back_publish if is_engine else self._parameters.front_publish
            ),
            output_address=self._parameters.back_output if is_engine else "",
            front_ends=self._front_ends_order().front_ends if is_engine else [],
            protocol=PROTOCOL_VERSION,
            version=SWELL_VERSION,
        )
        return [*actions, Reply(sender, welcome)]

    def _count_restart(self, rank: int, incarnation: int) -> None:
        # An engine that was only silent for a while comes back as the same incarnation.
        known = self._last_incarnation.get(rank)
        self._last_incarnation[rank] = incarnation
        restarted = known is not None and known != incarnation
        self._restarts[rank] = self._restarts.get(rank, 0) + restarted

    def _choose_wave(self, hello: Hello) -> None:
        # All engines agree on this setting; a cluster that changed it starts from no engines.
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

    def _index_for(self, hello: Hello) -> int:
        members = self._members[hello.kind]
        if hello.index >= 0:
            return hello.index
        for index, member in members.items():
            if member.incarnation == hello.incarnation:
                return index
        return next(i for i in range(len(members) + 1) if i not in members)

    def _why_refused(self, hello: Hello, index: int) -> Refused | None:
        held = self._members[hello.kind].get(index)
        if held is not None and held.incarnation != hello.incarnation:
            return Refused(
                f"{hello.kind} {index} is held by pid {held.pid} on {held.host}, "
                "which has not been silent for long enough to be gone",
                field="index",
                final=False,
            )
        engines = self._members["engine"].values()
        others = {
            peer.index: peer.group_config
            for peer in engines
            if hello.kind != "engine" or peer.index != index
        }
        return refused_by_settings(hello, others)

    def _dismiss_other_models(self, engine: Hello) -> list[Action]:
        """Remove front ends of another model than an engine that was let in."""
        actions: list[Action] = []
        for index, member in list(self._members["front_end"].items()):
            field = differing_model(member.group_config, engine.group_config)
            if field is not None:
                theirs, ours = member.group_config.get(field), engine.group_config[field]
                why = f"was sent away: its {field} is {theirs!r}, that of the engines {ours!r}"
                actions += self._remove("front_end", index, why)
        return actions

    def _alive(
        self, sender: bytes, message: Ready | Heartbeat | Draining, now: float
    ) -> list[Action]:
        member = self._find(message)
        epoch = self._parameters.epoch
        if member is None:
            return [Reply(sender, HeartbeatAck(epoch, known=False))]
        member.last_seen = now
        member.group_status = message.group_status
        actions: list[Action] = [Reply(sender, HeartbeatAck(epoch, known=True))]
        if isinstance(message, Draining) and not member.draining:
            member.draining, member.ready = True, False
            self._engines_changed()
            actions.append(Notice(f"{message.kind.replace('_', ' ')} {message.index} drains"))
        if isinstance(message, Ready) and not member.ready and not member.draining:
            setups = {
                peer.index: peer.setup
                for peer in self._members["engine"].values()
                if peer.setup is not None
            }
            refusal = refused_by_weights(message.index, message.setup, setups)
            if refusal is not None:
                removed = self._remove(message.kind, message.index, "was refused")
                return [*removed, Reply(sender, refusal)]
            member.ready = True
            member.setup = message.setup
            self._engines_changed()
            actions.append(Notice(f"{message.kind.replace('_', ' ')} {message.index} is ready"))
        return actions

    def _remove(self, kind: MemberKind, index: int, why: str) -> list[Action]:
        del self._members[kind][index]
        self._engines_changed()
        actions: list[Action] = [Notice(f"{kind.replace('_', ' ')} {index} {why}")]
        if kind == "front_end":
            actions.append(PublishOrder(self._front_ends_order()))
        return actions

    def _engines_changed(self) -> None:
        self._urgent = True
        engines = self._members["engine"].values()
        self._wave.take_members(frozenset(engine.index for engine in engines if engine.ready))

    def _expire(self, now: float) -> list[Action]:
        limit = now - self._parameters.member_timeout
        silent = [
            (kind, index)
            for kind, members in self._members.items()
            for index, member in members.items()
            if member.last_seen < limit
        ]
        actions: list[Action] = []
        for kind, index in silent:
            actions += self._remove(kind, index, "has been silent for too long")
        return actions

    # -- lockstep groups ---------------------------------------------------------------------------

    def _form_group(self, now: float) -> list[Action]:
        if self._formation is None:
            return []
        engines = {
            index: Standing(member.incarnation, member.group_status)
            for index, member in self._members["engine"].items()
        }
        known = self._formation.plan
        orders = self._formation.orders(engines, now)
        actions: list[Action] = [PublishOrder(order) for order in orders]
        for order in orders:
            if known is None or order.topology != known.topology:
                ranks = ", ".join(str(member.rank) for member in order.members)
                actions.append(Notice(f"engines {ranks} form group {order.topology}"))
        return actions

    # -- stats and waves -------------------------------------------------------------------------

    def _stats(self, stats: EngineStats) -> None:
        member = self._members["engine"].get(stats.rank)
        if member is None or member.incarnation != stats.incarnation:
            return
        if member.stats is not None and member.stats.version >= stats.version:
            return
        member.stats = stats
        self._changed |= not self._balanced_outside
        self._urgent |= self._wave.stats(stats)

    @property
    def _balanced_outside(self) -> bool:
        """Whether every front end serves one engine, so that nobody here needs to know loads."""
        front_ends = self._members["front_end"].values()
        return bool(front_ends) and all(each.scope.rank is not None for each in front_ends)

    def _wave_report(self, report: WaveComplete | StartWave) -> None:
        member = self._members["engine"].get(report.rank)
        if member is not None and member.incarnation == report.incarnation:
            self._urgent |= self._wave.report(report)

    # -- publication -----------------------------------------------------------------------------

    def _subscribed(self, kind: MemberKind) -> list[Action]:
        if kind == "engine":
            return [PublishOrder(self._front_ends_order())]
        self._urgent = True
        return []

    def _front_ends_order(self) -> FrontEnds:
        entries = [
            FrontEndEntry(member.index, member.incarnation, member.addresses, member.scope)
            for member in self._members["front_end"].values()
            if member.addresses is not None
        ]
        return FrontEnds(self._parameters.epoch, entries)

    def _repeat_order(self, now: float) -> list[Action]:
        """Tell engines who the front ends are once in a while, in case they did not hear it."""
        if now < self._order_due:
            return []
        self._order_due = now + self._parameters.publish_idle_interval
        return [PublishOrder(self._front_ends_order())]

    def _publish_if_due(self, now: float) -> list[Action]:
        age = float("inf") if self._last_published is None else now - self._last_published
        due = (
            self._urgent
            or (self._changed and age >= self._parameters.publish_interval)
            or age >= self._parameters.publish_idle_interval
        )
        if not due:
            return []
        self._urgent = self._changed = False
        self._last_published = now
        self._version += 1
        return [PublishView(self.view())]

    def view(self) -> ClusterView:
        """Return the cluster as it is known now."""
        engines = [
            EngineEntry(
                member.index, member.incarnation, member.ready, member.host,
                self._restarts[member.index], member.setup, member.stats,
            )
            for _, member in sorted(self._members["engine"].items())
        ]  # fmt: skip
        return ClusterView(
            epoch=self._parameters.epoch,
            version=self._version,
            wave=self._wave.wave,
            running=self._wave.running,
            engines=engines,
            num_front_ends=sum(member.ready for member in self._members["front_end"].values()),
            wakeups_total=dict(self._wave.wakeups),
        )
