"""The races of a published protocol that could happen here, one by one, played on the machines.

Each test is named after what would go wrong. `docs/waves.md` lists the races and says which of
them cannot apply.
"""

from dataclasses import dataclass, field

import msgspec
import pytest

from coordinator.events import Action, Event, FromMember, PublishOrder, Tick
from coordinator.state import CoordinatorParameters, CoordinatorState
from engine.lockstep.wave import Action as Next
from engine.lockstep.wave import EngineWave, Gather, Park, Step
from engine.scheduler.admission import RankState
from engine.shared.messages import (
    ClusterView,
    EngineStats,
    Goodbye,
    Hello,
    StartDpWave,
    StartWave,
    WakeUp,
    WaveComplete,
)
from engine.shared.version import PROTOCOL_VERSION
from tests.protocol.explorer import explore
from tests.protocol.situation import Setup
from tests.protocol.wire import hello, ready, replace_member
from tests.protocol.world import World

IDLE = RankState(*[0] * len(RankState._fields))


@dataclass
class Group:
    """Engines and a coordinator; nothing travels between them unless a test says so."""

    ranks: list[EngineWave]
    hub: CoordinatorState
    work: list[int] = field(default_factory=lambda: [0, 0])
    """Steps left on each rank."""
    now: float = 0.0

    def next(self, rank: int) -> Next:
        return self.ranks[rank].next_action(self.work[rank] > 0, IDLE)

    def request(self, rank: int, wave: int = 0, steps: int = 1) -> None:
        self.ranks[rank].request_received(wave)
        self.work[rank] += steps

    def gather(self) -> None:
        """Let all ranks through one gather; fails if one of them does not want to."""
        rows = []
        for rank in range(len(self.ranks)):
            action = self.next(rank)
            assert isinstance(action, Gather), f"rank {rank} does not join: {action}"
            rows.append(action.row.pack())
        for each in self.ranks:
            each.gathered(rows)

    def step(self) -> None:
        """Let all ranks through one step; fails if one of them does not want to."""
        for rank, each in enumerate(self.ranks):
            action = self.next(rank)
            assert isinstance(action, Step), f"rank {rank} does not join: {action}"
            each.launched()
            each.landed()
            self.work[rank] = max(0, self.work[rank] - 1)

    def tell_hub(self, *ranks: int) -> list[StartDpWave]:
        """Deliver the reports of these ranks to the coordinator; return its orders."""
        orders = []
        for rank in ranks:
            for report in self.ranks[rank].take_reports():
                orders += self.hub_takes(report)
        return orders

    def hub_takes(self, event: Event, after: float = 0.0) -> list[StartDpWave]:
        self.now += after
        return orders_in(self.hub.handle(event, self.now))

    def obey(self, orders: list[StartDpWave], *ranks: int) -> None:
        for order in orders:
            for rank in ranks:
                self.ranks[rank].start_ordered(order)

    def run_until_parked(self) -> None:
        while not all(isinstance(self.next(rank), Park) for rank in range(len(self.ranks))):
            if isinstance(self.next(0), Gather):
                self.gather()
            else:
                self.step()

    @property
    def view(self) -> ClusterView:
        return self.hub.view()


def orders_in(actions: list[Action]) -> list[StartDpWave]:
    return [
        action.order
        for action in actions
        if isinstance(action, PublishOrder) and isinstance(action.order, StartDpWave)
    ]


def new_engine(rank: int, wave: int = 0, gather_interval: int = 1) -> EngineWave:
    return EngineWave(rank=rank, incarnation=rank + 1, wave=wave, gather_interval=gather_interval)


def empty_hub() -> CoordinatorState:
    return CoordinatorState(
        CoordinatorParameters(
            epoch=1, front_publish="", back_publish="", back_output="",
            publish_interval=0.1, publish_idle_interval=3.0, member_timeout=1e9,
        )
    )  # fmt: skip


def new_group(gather_interval: int = 1) -> Group:
    """Two ranks that have just been formed and paused in wave 1, and a coordinator that knows."""
    hub = empty_hub()
    for rank in range(2):
        hub.handle(FromMember(b"", hello(rank)), 0.0)
        hub.handle(FromMember(b"", ready(rank)), 0.0)
    group = Group([new_engine(rank, 0, gather_interval) for rank in range(2)], hub)
    group.gather()
    group.tell_hub(0, 1)
    assert [each.wave for each in group.ranks] == [1, 1]
    return group


@pytest.fixture
def group() -> Group:
    return new_group()


def hold(group: Group) -> None:
    for each in group.ranks:
        each.pause_requested()
    group.gather()
    assert all(each.held for each in group.ranks)
    group.tell_hub(0, 1)


# -- starting and pausing ------------------------------------------------------------------------


def test_r1_a_request_that_meets_a_pausing_group_is_left_lying(group: Group) -> None:
    group.request(0)
    group.next(0)
    group.obey(group.tell_hub(0), 1)
    group.run_until_parked()
    assert [each.wave for each in group.ranks] == [2, 2]
    group.request(1, wave=1)
    assert isinstance(group.next(1), Gather), "the stamp of the old wave does not matter"
    group.obey(group.tell_hub(1), 0)
    group.run_until_parked()
    assert group.work == [0, 0]


def test_r2_a_start_is_undone_by_the_end_of_the_wave_before_it(group: Group) -> None:
    group.request(0)
    group.next(0)
    group.obey(group.tell_hub(0), 1)
    group.run_until_parked()
    group.request(1)
    group.next(1)
    assert group.tell_hub(1), "the start of wave 2 comes first"
    group.tell_hub(0)
    assert (group.view.wave, group.view.running) == (2, True)
    assert group.hub_takes(Tick(), after=0.03), "rank 0 is still asked to come"


def test_r8_the_engine_that_asks_for_the_group_waits_for_its_own_order(group: Group) -> None:
    group.request(0)
    assert isinstance(group.next(0), Gather)
    (order,) = group.tell_hub(0)
    assert order.excluded_rank == 0


def test_r9_an_order_that_nobody_follows_latches_the_running_flag(group: Group) -> None:
    assert group.hub_takes(WakeUp(0, 0, 1))
    assert not group.view.running
    assert group.hub_takes(Tick(), after=0.03), "it is repeated"
    assert not group.view.running
    group.request(1)
    group.next(1)
    group.tell_hub(1)
    assert group.view.running


def test_r14_ranks_gather_at_different_steps() -> None:
    group = new_group(gather_interval=3)
    group.request(0, steps=7)
    group.next(0)
    group.obey(group.tell_hub(0), 1)
    kinds = []
    while not isinstance(group.next(0), Park):
        actions = {type(group.next(rank)) for rank in range(2)}
        assert len(actions) == 1, "both do the same, whatever they hold"
        kinds += [kind.__name__[0] for kind in actions]
        if actions == {Gather}:
            group.gather()
        else:
            group.step()
    assert "".join(kinds) == "GSSSGSSSGSSSG"


def test_r15_the_first_request_meets_ranks_that_have_not_subscribed_yet(group: Group) -> None:
    group.request(1)
    group.next(1)
    lost = group.tell_hub(1)
    assert lost
    orders: list[StartDpWave] = []
    for _ in range(3):
        orders = group.hub_takes(Tick(), after=0.03)
        assert [order.excluded_rank for order in orders] == [-1]
    group.obey(orders, 0)
    group.next(0)
    group.tell_hub(0)
    assert not group.hub_takes(Tick(), after=0.03), "all have come"
    group.run_until_parked()


def test_r20_the_wave_of_a_new_rank_is_too_low_to_wake_the_others(group: Group) -> None:
    for each in group.ranks:
        each.request_received(7)
    group.hub.handle(WakeUp(0, 0, 7), 0.0)
    newcomer = new_engine(1)
    newcomer.regroup(1)
    group.ranks[0].regroup(1)
    group.ranks[1] = newcomer
    group.gather()
    assert newcomer.wave == group.ranks[0].wave == 8
    group.request(1, wave=0)
    group.next(1)
    group.tell_hub(0)
    group.obey(group.tell_hub(1), 0)
    group.run_until_parked()
    assert group.work == [0, 0]


def test_r22_the_exclusion_of_a_notice_never_matches(group: Group) -> None:
    (order,) = group.hub_takes(WakeUp(front_end=0, rank=1, wave=1))
    group.obey([order], 0, 1)
    assert isinstance(group.next(0), Gather)
    assert isinstance(group.next(1), Park), "it comes with its request"
    (repeated,) = group.hub_takes(Tick(), after=0.03)
    group.obey([repeated], 1)
    assert isinstance(group.next(1), Gather), "and if that does not come, without"


def test_r23_requests_hang_when_every_notice_is_lost() -> None:
    result = explore(World(Setup(requests=2, notices=False)))
    assert result.problem is None, result.problem


def test_r24_a_start_is_lost_with_the_coordinator(group: Group) -> None:
    group.request(1)
    group.next(1)
    group.tell_hub(1)
    new_hub = new_group().hub
    group.ranks[1].tick(10.0)
    group.ranks[1].tick(10.1)
    group.hub, group.now = new_hub, 10.1
    orders = group.tell_hub(1)
    assert orders
    group.obey(orders, 0)
    group.run_until_parked()
    assert group.work == [0, 0]


# -- holding and resuming ------------------------------------------------------------------------


def test_r4_a_request_rearms_one_rank_of_a_held_group(group: Group) -> None:
    hold(group)
    group.request(0, wave=0)
    assert isinstance(group.next(0), Park)
    assert group.tell_hub(0) == []


def test_r5_a_late_order_rearms_one_rank_of_a_held_group(group: Group) -> None:
    late = group.hub_takes(WakeUp(0, 0, 1))
    hold(group)
    group.obey([*late, StartDpWave(group.ranks[0].wave, -1)], 0, 1)
    assert all(isinstance(group.next(rank), Park) for rank in range(2))


def test_r6_a_notice_makes_some_ranks_step_while_others_are_held(group: Group) -> None:
    hold(group)
    assert group.hub_takes(WakeUp(0, 0, group.view.wave)) == []
    assert group.hub_takes(Tick(), after=1.0) == []


def test_r7_an_operation_begins_while_ranks_are_in_different_states(group: Group) -> None:
    group.request(0, steps=9)
    group.next(0)
    group.obey(group.tell_hub(0), 1)
    group.gather()
    group.ranks[1].pause_requested()
    assert not any(each.held for each in group.ranks), "it knows, the other does not"
    group.step()
    group.gather()
    assert all(each.held for each in group.ranks)


def test_r10_requests_that_come_during_a_hold_are_invisible(group: Group) -> None:
    hold(group)
    group.request(1)
    group.ranks[0].resume_requested()
    group.next(0)
    group.obey(group.tell_hub(0), 1)
    group.run_until_parked()
    assert group.work == [0, 0]


def test_r11_a_hold_begins_in_the_middle_of_a_step(group: Group) -> None:
    group.request(0, steps=2)
    group.next(0)
    group.obey(group.tell_hub(0), 1)
    group.gather()
    for each in group.ranks:
        each.pause_requested()
    assert isinstance(group.next(0), Step)
    assert not group.ranks[0].held
    group.step()
    group.gather()
    assert group.ranks[0].held
    assert group.work[0] == 1, "what is left is kept"


def test_r12_a_hold_costs_dummy_steps(group: Group) -> None:
    for each in group.ranks:
        each.pause_requested()
    group.gather()
    assert all(each.held and each.step == 0 for each in group.ranks)


def test_r13_a_resume_sent_twice_splits_the_group(group: Group) -> None:
    hold(group)
    for rank in (0, 0, 1, 1):
        group.ranks[rank].resume_requested()
    group.gather()
    before = [(each.phase, each.wave, each.hold_epoch) for each in group.ranks]
    group.ranks[1].resume_requested()
    assert [(each.phase, each.wave, each.hold_epoch) for each in group.ranks] == before
    assert all(isinstance(group.next(rank), Park) for rank in range(2))


def test_r13_a_resume_that_reaches_one_rank_only_leaves_it_alone(group: Group) -> None:
    hold(group)
    group.ranks[1].resume_requested()
    assert isinstance(group.next(1), Gather)
    group.obey(group.tell_hub(1), 0)
    assert isinstance(group.next(0), Gather)


def test_a_pause_that_was_overtaken_by_its_resume_holds_the_group_for_ever(group: Group) -> None:
    group.ranks[0].pause_requested(1)
    group.ranks[0].resume_requested(2)
    group.ranks[1].resume_requested(2)
    group.ranks[1].pause_requested(1)
    assert all(isinstance(group.next(rank), Park) for rank in range(2))
    assert not any(each.held for each in group.ranks)


# -- membership and stats ------------------------------------------------------------------------


def stats(rank: int, version: int, wave: int, step: int, incarnation: int = 0) -> EngineStats:
    return EngineStats(
        rank=rank, incarnation=incarnation or rank + 1, version=version, wave=wave, step=step,
        waiting=0, running=version, kv_usage=0.0, queued_prefill_tokens=0,
    )  # fmt: skip


def running_counts(group: Group) -> dict[int, int]:
    return {entry.rank: entry.stats.running for entry in group.view.engines if entry.stats}


def test_r16_independent_engines_wait_for_each_other() -> None:
    hub = empty_hub()
    for rank in range(2):
        hub.handle(
            FromMember(b"", Hello("engine", rank, rank + 1, "", 0, protocol=PROTOCOL_VERSION)), 0.0
        )
        hub.handle(FromMember(b"", ready(rank)), 0.0)
    assert orders_in(hub.handle(stats(0, version=1, wave=0, step=1), 1.0)) == []
    assert hub.view().running, "its own stats say so"
    idle = msgspec.structs.replace(stats(0, version=2, wave=0, step=1), running=0)
    assert orders_in(hub.handle(idle, 2.0)) == []
    assert (hub.view().running, hub.view().wave) == (False, 1)


def test_r17_a_slow_engines_stats_are_called_out_of_order(group: Group) -> None:
    group.hub_takes(stats(0, version=50, wave=1, step=900))
    group.hub_takes(stats(1, version=3, wave=1, step=2))
    assert running_counts(group) == {0: 50, 1: 3}


def test_r18_stats_of_a_removed_rank_bring_it_back(group: Group) -> None:
    group.hub.handle(FromMember(b"", Goodbye("engine", 1, 2)), 0.0)
    group.hub_takes(stats(1, version=9, wave=1, step=1))
    assert [entry.rank for entry in group.view.engines] == [0]


def test_r19_a_zombie_speaks_for_its_successor(group: Group) -> None:
    replace_member(group.hub, 1)
    zombie = 77
    group.hub_takes(StartWave(1, zombie, 99))
    group.hub_takes(stats(1, version=9, wave=99, step=1, incarnation=zombie))
    assert (group.view.wave, group.view.running) == (1, False)


def test_an_end_that_comes_twice_or_late_stops_a_later_wave(group: Group) -> None:
    group.request(0)
    group.next(0)
    group.tell_hub(0)
    group.hub_takes(WaveComplete(0, 1, 0))
    assert (group.view.wave, group.view.running) == (1, True)
