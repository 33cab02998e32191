"""A whole lockstep cluster as one explorable system: the production state machines, no sockets.

Engines run `EngineWave` behind a minimal queue, the coordinator is `CoordinatorState`, front ends
are `Router`. The channels between them are modelled with the sockets' guarantees:

- requests: FIFO per front end and engine, never lost
- reports to the coordinator: FIFO per engine, lost only when it restarts
- views: FIFO; a front end reads them at any time
- notices and orders: lost, delayed, reordered, and duplicated up to `duplicates` times
- operators' calls: never lost, in any order

A collective is synchronous: a rank that enters waits until all ranks of the group are in the same
one. Ranks then leave it at once; leaving later would make no difference to others, because a rank
inside handles no messages. A step is waited for only when it lands: that is possible once all have
launched it, and, if steps overlap, at any time from then on. All requests are equivalent, and so
are front ends, so states are distinguished by counts, with the front ends sorted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from coordinator.events import Event, FromMember, PublishOrder, PublishView, Tick
from coordinator.state import CoordinatorParameters, CoordinatorState
from engine.lockstep.wave import (
    Action,
    EngineWave,
    Gather,
    Land,
    LockstepError,
    Park,
    Phase,
    Step,
)
from engine.scheduler.admission import RankState
from engine.shared.messages import ClusterView, StartDpWave, WakeUp
from server.router.router import Router
from server.router.routing import LeastLoaded
from tests.protocol.explorer import Arena, Label, State, Violation
from tests.protocol.situation import (
    Front,
    Hub,
    Rank,
    Rest,
    Setup,
    add_orders,
    given_up,
    landed,
    launched,
    less_duplicates,
    put,
    with_front,
    with_rank,
    without,
)
from tests.protocol.wire import (
    coordinator_view,
    engine_view,
    front_view,
    hello,
    obey,
    ready,
    replace_member,
    report_event,
    report_key,
    tag_cycle,
    tick_until_due,
    view_key,
)

FOREVER = float("inf")
_LOAD = RankState(*[0] * len(RankState._fields))


def _new_front() -> Router:
    return Router(
        front_end=0, incarnation=1, first_id=0, policy=LeastLoaded(), table=None, grace=FOREVER,
        max_resumes=1, halted_timeout=300.0, resume_timeout=FOREVER,
    )  # fmt: skip


@dataclass
class World:
    """The transitions of one configuration; see `System`."""

    setup: Setup
    engines: Arena[EngineWave] = field(default_factory=lambda: Arena(engine_view))
    hubs: Arena[CoordinatorState] = field(default_factory=lambda: Arena(coordinator_view))
    fronts: Arena[Router] = field(default_factory=lambda: Arena(front_view))

    # -- System ----------------------------------------------------------------------------------

    def initial(self) -> State:
        """A group that has just been formed, with an empty coordinator's first view in transit."""
        setup = self.setup
        ranks = tuple(
            Rank(self.engines.intern(self._new_engine(rank))) for rank in range(setup.engines)
        )
        hub, view = self._new_hub(epoch=1, waves=[0] * setup.engines)
        blank = Front(self.fronts.intern(_new_front()), (), ((),) * setup.engines)
        front = self._see(blank, view)
        rest = Rest(
            setup.requests, 0, 0, setup.duplicates, setup.coordinator_restarts,
            setup.engine_restarts,
        )  # fmt: skip
        return (ranks, Hub(hub), (front,) * setup.front_ends, rest)

    def is_final(self, state: State) -> bool:
        ranks, hub, _, rest = state
        to_come = (rest.unsent, rest.coordinator_restarts, rest.engine_restarts)
        if any(to_come) or rest.calls < len(self.setup.calls):
            return False
        if rest.done < self.setup.requests:
            return False
        if not all(self._is_at_rest(rank) for rank in ranks):
            return False
        waves = [self.engines.objects[rank.wave] for rank in ranks]
        view = self.hubs.objects[hub.state]._wave
        if any(wave.wave > self.setup.max_wave for wave in waves):
            raise Violation(f"{waves[0].wave} waves for {self.setup.requests} requests")
        return not view.running and all(wave.wave == view.wave for wave in waves)

    def _is_at_rest(self, rank: Rank) -> bool:
        if rank.calls or any(report[0] != "stats" for report in rank.reports):
            return False
        if self.engines.objects[rank.wave].phase is not Phase.PAUSED:
            return False
        return self._act(rank)[0] == rank

    def successors(self, state: State) -> Iterator[tuple[Label, State]]:
        ranks, _, fronts, rest = state
        for number, rank in enumerate(ranks):
            yield from self._enter(state, number)
            if rank.inside is None or (self.setup.drains_late and rank.inside[0] == "gather"):
                yield from self._take(state, number)
            for order in rank.orders:
                lost = rank._replace(orders=without(rank.orders, order))
                yield ("lose order", number, order), with_rank(state, number, lost)
            if rank.reports:
                yield self._deliver_report(state, number)
            if self.setup.stats:
                yield from self._repeat_evidence(state, number)
        yield from self._hub_transitions(state)
        if rest.unsent:
            for index in range(len(fronts)):
                yield from self._send(state, index)
        if rest.calls < len(self.setup.calls):
            yield self._issue_call(state)
        if rest.engine_restarts:
            for number in range(len(ranks)):
                yield from self._restart_engine(state, number)
        for number in range(len(ranks)):
            yield from self._regroup(state, number)

    # -- engines ---------------------------------------------------------------------------------

    def _new_engine(self, rank: int, wave: int = 0, phase: Phase = Phase.FORMING) -> EngineWave:
        return self.setup.engine(
            rank=rank,
            incarnation=rank + 1,
            wave=wave,
            gather_interval=self.setup.gather_interval,
            max_in_flight=self.setup.max_in_flight,
            phase=phase,
        )

    def _restart_engine(self, state: State, number: int) -> Iterator[tuple[Label, State]]:
        """Replace a rank, in any state; messages to the dead one are resent.

        At the last moment of a collective, some of the others may still complete it.
        """
        yield ("engine restarts", number), self._replaced(state, number)
        if state[0][number].inside is not None:
            return
        rank = self._advance(state[0][number])
        others = [other for other in range(len(state[0])) if other != number]
        inside = [each.inside for each in (rank, *(state[0][other] for other in others))]
        if None in inside or inside[0][0] == "join" or len({kind for kind, *_ in inside}) > 1:
            return
        entered = with_rank(state, number, rank)
        if inside[0][0] == "step":
            others = [other for other in others if self._may_land(entered[0], other)]
        table = tuple(each.inside[1] for each in entered[0])
        for size in range(1, len(others) + 1):
            for lucky in combinations(others, size):
                after = entered
                for other in lucky:
                    after = self._leave_collective(after, other, table)
                label = ("engine restarts inside", number, lucky)
                yield label, self._replaced(after, number)

    def _leave_collective(self, state: State, number: int, table: tuple[Any, ...]) -> State:
        """Let one rank leave a collective that it has completed."""
        rank = state[0][number]
        if rank.inside[0] == "gather":
            return with_rank(state, number, self._return_from_gather(rank, table))
        return self._land(state, number)

    def _replaced(self, state: State, number: int) -> State:
        ranks, hub, fronts, rest = state
        welcome = self.hubs.objects[hub.state]._wave.wave
        new = self._new_engine(number, welcome, phase=Phase.APART)
        again = len(ranks[number].work) + sum(len(front.sent[number]) for front in fronts)
        rest = rest._replace(
            unsent=rest.unsent + again,
            engine_restarts=rest.engine_restarts - 1,
            topology=rest.topology + 1,
        )
        fronts = tuple(sorted(front._replace(sent=put(front.sent, number, ())) for front in fronts))
        ranks = put(ranks, number, Rank(self.engines.intern(new), calls=ranks[number].calls))
        hub_state, _ = self.hubs.apply(
            hub.state, ("replaced", number), lambda h: replace_member(h, number)
        )
        view = view_key(self.hubs.objects[hub_state])
        if rest.unsent:
            fronts = tuple(self._show(front, (view,)) for front in fronts)
        return (ranks, hub._replace(state=hub_state), fronts, rest)

    def _regroup(self, state: State, number: int) -> Iterator[tuple[Label, State]]:
        """Let a rank leave a superseded group, in any state, or join the next one."""
        rank, newest = state[0][number], state[3].topology
        wave = self.engines.objects[rank.wave]
        if wave.topology == newest:
            return
        if wave.phase is not Phase.APART:
            # Some of the steps in flight may be over; the others are given up.
            while True:
                rank = state[0][number]
                left, _ = self._apply(rank, "lost", lambda e: e.group_lost())
                left = given_up(left._replace(inside=None))
                yield ("leave group", number, len(rank.flying)), with_rank(state, number, left)
                if not rank.flying or self.setup.max_in_flight == 1:
                    return
                over, ended = landed(rank)
                state = with_rank(state, number, over)
                state = (*state[:3], state[3]._replace(done=state[3].done + ended))
        elif rank.inside is None:
            meeting = with_rank(state, number, rank._replace(inside=("join", newest)))
            yield ("join group", number), self._complete(meeting)
        elif rank.inside[1] != newest:
            yield ("give up", number), with_rank(state, number, rank._replace(inside=None))

    def _apply(self, rank: Rank, event: Any, act: Any) -> tuple[Rank, Any]:
        """Let a rank's `EngineWave` act, and send its reports."""

        def run(engine: EngineWave) -> Any:
            wave = engine.wave
            try:
                returned = act(engine)
            except LockstepError as error:
                raise Violation(str(error)) from error
            if engine.wave < wave:
                raise Violation(f"an engine's wave goes back from {wave} to {engine.wave}")
            return returned, tuple(report_key(report) for report in engine.take_reports())

        wave, (returned, reports) = self.engines.apply(rank.wave, event, run)
        return rank._replace(wave=wave, reports=rank.reports + reports), returned

    def _act(self, rank: Rank) -> tuple[Rank, Action]:
        has_work = any(
            left > self.setup.foresees_ends * sum(in_flight) for left, in_flight in rank.work
        )
        return self._apply(rank, ("act", has_work), lambda e: e.next_action(has_work, _LOAD))

    def _enter(self, state: State, number: int) -> Iterator[tuple[Label, State]]:
        """Let a rank do what its loop does next, if it is not waiting."""
        if state[0][number].inside is not None:
            if self.setup.max_in_flight > 1 and self._may_land(state[0], number):
                yield ("land", number), self._complete(self._land(state, number))
            return
        rank = self._advance(state[0][number])
        if rank.inside is None:
            if rank != state[0][number]:
                yield ("settle", number), with_rank(state, number, rank)
            return
        state = with_rank(state, number, rank)
        self._check_company(state[0], number)
        yield ("enter", number, rank.inside), self._complete(state)

    def _advance(self, rank: Rank) -> Rank:
        """Advance the rank until it waits for others, or for messages."""
        while True:
            rank, action = self._act(rank)
            match action:
                case Gather(row):
                    return rank._replace(inside=("gather", tuple(row.pack())))
                case Land(drains):
                    if not rank.flying:
                        raise Violation("a rank waits for a step that it has not launched")
                    return rank._replace(inside=("step", rank.flying[0], drains))
                case Step():
                    rank = self._launch(rank)
                case Park():
                    return rank

    def _launch(self, rank: Rank) -> Rank:
        tag = self.engines.objects[rank.wave]._tag
        rank, _ = self._apply(rank, "launched", lambda e: e.launched())
        return launched(rank, tag)

    def _has_launched(self, rank: Rank, tag: int) -> bool:
        """Return whether a rank has launched the step with this tag, possibly with later ones."""
        cycle = tag_cycle(self.setup.max_in_flight)
        return rank.newest >= 0 and (rank.newest - tag) % cycle < cycle // 2

    def _check_company(self, ranks: tuple[Rank, ...], number: int) -> None:
        """Check that no ranks wait for each other, or for one that will not come."""
        own = self.engines.objects[ranks[number].wave]
        kind, what = ranks[number].inside[:2]
        where = f"{kind} {own._tag if kind == 'gather' else what}"
        waves = [self.engines.objects[rank.wave] for rank in ranks]
        if any(w.phase is Phase.APART or w.topology != own.topology for w in waves):
            return  # a member has died or left: the collective fails
        for peer_number, peer in enumerate(ranks):
            wave = self.engines.objects[peer.wave]
            if peer_number == number:
                continue
            if peer.inside is None:
                comes = kind == "step" and self._has_launched(peer, what)
                if wave.phase is Phase.HELD and wave._held_at >= own.hold_epoch and not comes:
                    raise Violation(f"rank {number} enters {where} but {peer_number} is held")
                continue
            if peer.inside[0] == "step":
                fits = self._has_launched(ranks[number], peer.inside[1])
            elif kind == "step":
                fits = self._has_launched(peer, what)
            else:
                fits = wave._tag == own._tag
            if not fits:
                raise Violation(
                    f"rank {number} enters {where} but {peer_number} is in "
                    f"{peer.inside[0]} {wave._tag}"
                )

    def _may_land(self, ranks: tuple[Rank, ...], number: int) -> bool:
        """Return whether a rank's awaited step can be over: all of its group have launched it."""
        inside = ranks[number].inside
        if inside is None or inside[0] != "step":
            return False
        waves = [self.engines.objects[rank.wave] for rank in ranks]
        if any(w.phase is Phase.APART or w.topology != waves[number].topology for w in waves):
            return False
        return all(self._has_launched(rank, inside[1]) for rank in ranks)

    def _land(self, state: State, number: int) -> State:
        """Let one rank land its oldest step, up to where it handles messages."""
        rank, rest = state[0][number], state[3]
        drains = rank.inside[2]
        rank, _ = self._apply(rank, "landed", lambda e: e.landed())
        rank, ended = landed(rank._replace(inside=None))
        if self.setup.max_in_flight == 1:
            rank = rank._replace(newest=-1)  # all others leave the step too
        if not drains:
            rank = self._advance(rank)
        state = (*state[:3], rest._replace(done=rest.done + ended))
        state = with_rank(state, number, rank)
        self._check_ended(state[0])
        if rank.inside is not None:
            self._check_company(state[0], number)
        return state

    def _complete(self, state: State) -> State:
        """Let ranks leave a collective that all are in, up to where they handle messages."""
        while all(rank.inside is not None for rank in state[0]):
            ranks = state[0]
            kind, what = ranks[0].inside[:2]
            if kind == "step" and self.setup.max_in_flight == 1:
                if not all(self._may_land(ranks, number) for number in range(len(ranks))):
                    break
                for number in range(len(ranks)):
                    state = self._land(state, number)
                break
            if kind == "step" or any(rank.inside[0] != kind for rank in ranks):
                break
            if kind == "join":
                if any(rank.inside[1] != what for rank in ranks):
                    break
                ranks = tuple(
                    self._apply(rank, ("regroup", what), lambda e, what=what: e.regroup(what))[
                        0
                    ]._replace(inside=None)
                    for rank in ranks
                )
            else:
                table = tuple(rank.inside[1] for rank in ranks)
                ranks = tuple(self._return_from_gather(rank, table) for rank in ranks)
            state = (ranks, *state[1:])
            self._check_ended(ranks)
            for number, rank in enumerate(ranks):
                if rank.inside is not None:
                    self._check_company(ranks, number)
        return state

    def _check_ended(self, ranks: tuple[Rank, ...]) -> None:
        """Check that no rank computes after a wave has ended."""
        if self.setup.max_in_flight == 1:
            return  # other checks detect a rank alone in a step
        rests = (Phase.PAUSED, Phase.HELD)
        at_rest = any(self.engines.objects[rank.wave].phase in rests for rank in ranks)
        if at_rest and any(rank.flying for rank in ranks):
            raise Violation("a wave ends with steps in flight")

    def _return_from_gather(self, rank: Rank, table: tuple[tuple[int, ...], ...]) -> Rank:
        rank, _ = self._apply(rank, ("gathered", table), lambda e: e.gathered(table))
        _, action = self._act(rank)
        if isinstance(action, Step | Land):
            return self._advance(rank)
        return rank._replace(inside=None)

    def _take(self, state: State, number: int) -> Iterator[tuple[Label, State]]:
        """Let a rank handle one message that has arrived."""
        before = state[0][number]
        for order in before.orders:
            yield from self._take_order(state, number, order)
        for call in before.calls:
            rank, _ = self._apply(before, call, lambda e, call=call: obey(e, call))
            rank = rank._replace(calls=without(before.calls, call))
            yield ("take call", number, call), with_rank(state, number, rank)
        for index, front in enumerate(state[2]):
            if front.sent[number]:
                wave, *others = front.sent[number]
                rank, _ = self._apply(
                    before, ("request", wave), lambda e, wave=wave: e.request_received(wave)
                )
                request = (self.setup.steps, (0,) * len(rank.flying))
                rank = rank._replace(work=tuple(sorted((*rank.work, request))))
                front = front._replace(sent=put(front.sent, number, tuple(others)))
                after = with_front(with_rank(state, number, rank), index, front)
                yield ("take request", number, wave), after

    def _take_order(
        self, state: State, number: int, order: tuple[int, ...]
    ) -> Iterator[tuple[Label, State]]:
        before = state[0][number]
        wave, excluded, hold_epoch, topology = order
        told = StartDpWave(wave, excluded, hold_epoch, topology)
        rank, _ = self._apply(before, ("order", order), lambda e: e.start_ordered(told))
        taken = rank._replace(orders=without(before.orders, order))
        yield ("take order", number, order), with_rank(state, number, taken)
        if state[3].duplicates and rank != before:
            again = with_rank(less_duplicates(state), number, rank)
            yield ("take order, repeated", number, order), again

    def _repeat_evidence(self, state: State, number: int) -> Iterator[tuple[Label, State]]:
        before = state[0][number]
        engine = self.engines.objects[before.wave]
        if before.inside is not None and engine.awaits_peers:
            rank, _ = self._apply(before, "tick", tick_until_due)
            if rank.reports[-1] not in before.reports:
                yield ("ask again", number), with_rank(state, number, rank)
        elif before.inside is None and engine.phase is not Phase.FORMING:
            stats = ("stats", engine.wave, engine.running, engine.hold_epoch, engine.topology)
            if not before.reports:
                rank = before._replace(reports=(*before.reports, stats))
                yield ("stats", number), with_rank(state, number, rank)

    # -- coordinator -----------------------------------------------------------------------------

    def _new_hub(self, epoch: int, waves: list[int]) -> tuple[int, tuple[Any, ...]]:
        """Return a coordinator with all engines registered, and its view."""
        state = CoordinatorState(
            CoordinatorParameters(
                epoch=epoch, front_publish="", back_publish="", back_output="",
                publish_interval=FOREVER, publish_idle_interval=FOREVER, member_timeout=FOREVER,
            )
        )  # fmt: skip
        for rank, wave in enumerate(waves):
            state.handle(FromMember(b"", hello(rank, wave)), 0.0)
            if rank == 0:
                lockstep = self.setup.coordinator()
                lockstep.adopt(wave)
                state._wave = lockstep
        for rank in range(len(waves)):
            state.handle(FromMember(b"", ready(rank)), 0.0)
        return self.hubs.intern(state), view_key(state)

    def _tell(self, state: State, key: Any, event: Event | None) -> State:
        """Pass the coordinator an event (None: its next order is due); perform its actions."""

        def run(hub: CoordinatorState) -> Any:
            wave = hub._wave.wave
            if event is None:
                actions = hub.handle(Tick(), hub.next_deadline(0.0))
            else:
                actions = hub.handle(event, 0.0)
            if hub._wave.wave < wave:
                raise Violation(f"the coordinator's wave goes back to {hub._wave.wave}")
            orders = tuple(
                (a.order.wave, a.order.excluded_rank, a.order.hold_epoch, a.order.topology)
                for a in actions
                if isinstance(a, PublishOrder) and isinstance(a.order, StartDpWave)
            )
            views = tuple(
                (a.view.epoch, a.view.wave, a.view.running)
                for a in actions
                if isinstance(a, PublishView)
            )
            return orders, views

        ranks, hub, fronts, rest = state
        number, (orders, views) = self.hubs.apply(hub.state, key, run)
        if orders:
            ranks = tuple(add_orders(rank, orders, self.setup.order_window) for rank in ranks)
        if views and rest.unsent:
            fronts = tuple(self._show(front, views) for front in fronts)
        newest = max(self.engines.objects[rank.wave].wave for rank in ranks)
        if self.hubs.objects[number]._wave.wave > newest:
            raise Violation("the coordinator is in a wave that no engine knows")
        return (ranks, hub._replace(state=number), fronts, rest)

    def _deliver_report(self, state: State, number: int) -> tuple[Label, State]:
        rank = state[0][number]
        report, *others = rank.reports
        state = with_rank(state, number, rank._replace(reports=tuple(others)))
        event = report_event(number, report)
        return ("report", number, report), self._tell(state, (number, report), event)

    def _hub_transitions(self, state: State) -> Iterator[tuple[Label, State]]:
        hub = state[1]
        for notice in dict.fromkeys(hub.notices):
            rank, wave = notice
            event = WakeUp(0, rank, wave)
            lost = (state[0], hub._replace(notices=without(hub.notices, notice)), *state[2:])
            yield ("lose notice", notice), lost
            yield ("notice", notice), self._tell(lost, ("notice", notice), event)
            if state[3].duplicates:
                after = self._tell(less_duplicates(state), ("notice", notice), event)
                yield ("notice, repeated", notice), after
        if self.hubs.objects[hub.state]._wave.orders_due < FOREVER:
            after = self._tell(state, "order again", None)
            if after != state:
                yield ("order again",), after
        if state[3].coordinator_restarts:
            yield self._restart_hub(state, keeps_reports=False)
            yield self._restart_hub(state, keeps_reports=True)

    def _restart_hub(self, state: State, *, keeps_reports: bool) -> tuple[Label, State]:
        ranks, hub, fronts, rest = state
        waves = [self.engines.objects[rank.wave].wave for rank in ranks]
        epoch = self.hubs.objects[hub.state]._parameters.epoch + 1
        number, view = self._new_hub(epoch, waves)
        if not keeps_reports:
            ranks = tuple(rank._replace(reports=()) for rank in ranks)
        fronts = tuple(front._replace(views=(view,)) for front in fronts)
        rest = rest._replace(coordinator_restarts=rest.coordinator_restarts - 1)
        return ("coordinator restarts", keeps_reports), (ranks, Hub(number), fronts, rest)

    # -- front ends and operators ----------------------------------------------------------------

    def _show(self, front: Front, views: tuple[tuple[Any, ...], ...]) -> Front:
        router = self.fronts.objects[front.router]
        last = front.views[-1] if front.views else front_view(router)
        return front if last == views[-1] else front._replace(views=(*front.views, views[-1]))

    def _see(self, front: Front, view: tuple[Any, ...]) -> Front:
        def look(router: Router) -> None:
            epoch, wave, running = view
            members = router.members
            version = 0 if members.view is None else members.view.version + 1
            before = members.wave
            router.handle(ClusterView(epoch, version, wave, running, [], 0), 0.0)
            if members.wave < before:
                raise Violation(f"a front end's wave goes back from {before} to {members.wave}")

        number, _ = self.fronts.apply(front.router, view, look)
        return front._replace(router=number)

    def _send(self, state: State, index: int) -> Iterator[tuple[Label, State]]:
        """Send a request anywhere, after reading none, some or all of the views in transit."""
        ranks, hub, fronts, rest = state
        front = fronts[index]
        while True:
            members = self.fronts.objects[front.router].members
            for number in range(len(ranks)):
                sent = put(front.sent, number, (*front.sent[number], members.wave))
                after = (ranks, hub, fronts, rest._replace(unsent=rest.unsent - 1))
                after = with_front(after, index, front._replace(sent=sent))
                yield ("send", index, number, members.wave), after
                if members.paused and self.setup.notices:
                    notices = tuple(sorted((*hub.notices, (number, members.wave))))
                    after = (after[0], hub._replace(notices=notices), *after[2:])
                    yield ("send with notice", index, number, members.wave), after
            if not front.views:
                return
            front = self._see(front, front.views[0])._replace(views=front.views[1:])

    def _issue_call(self, state: State) -> tuple[Label, State]:
        ranks, hub, fronts, rest = state
        call = self.setup.calls[rest.calls]
        asked = call.ranks or range(len(ranks))
        ranks = tuple(
            rank._replace(calls=(*rank.calls, call)) if number in asked else rank
            for number, rank in enumerate(ranks)
        )
        return ("issue", call), (ranks, hub, fronts, rest._replace(calls=rest.calls + 1))
