"""Which engines form the lockstep group, from where each says that it stands."""

from itertools import pairwise
from typing import Literal

import pytest

from coordinator.formation import (
    FIRST_PAUSE,
    NEVER,
    REPEAT_INTERVAL,
    REPLAN_DELAY,
    GroupFormation,
)
from coordinator.members import Member
from engine.lockstep.group_membership import GroupMembership
from engine.shared.messages import FormGroup, GroupMember, Hello, ProcessEntry

GRACE = 5.0


class Engine:
    """An engine that carries out what it is told."""

    def __init__(self, rank: int, incarnation: int = 1) -> None:
        self.member = GroupMember(rank, incarnation)
        self.membership = GroupMembership(self.member, f"host:{rank}")
        self.loading = False

    def take(self, order: FormGroup) -> None:
        place = self.membership.ordered(order)
        if place is not None and place.address:
            self.membership.joined()
        elif place is not None:
            self.membership.prepared(f"host:{self.member.rank}")

    @property
    def standing(self) -> Member:
        status = None if self.loading else self.membership.status
        process = ProcessEntry("engine", "h", "1", 1, None)
        rank, incarnation = self.member.rank, self.member.incarnation
        hello = Hello("engine", rank, incarnation, "h", 1)
        return Member(rank, incarnation, hello, process, 0.0, group_status=status)


class Group:
    """Engines and the formation that watches them."""

    def __init__(self, size: int = 3, regroup: Literal["shrink", "wait"] = "shrink") -> None:
        self.size, self.regroup = size, regroup
        self.engines: dict[int, Engine] = {}
        self.now = 100.0
        self.restart_coordinator()

    def restart_coordinator(self) -> None:
        self.formation = GroupFormation(self.size, self.regroup, GRACE)

    def add(self, *ranks: int, incarnation: int = 1) -> None:
        for rank in ranks:
            self.engines[rank] = Engine(rank, incarnation)

    def orders(self, after: float = 0.0) -> list[FormGroup]:
        self.now += after
        standing = {rank: engine.standing for rank, engine in self.engines.items()}
        return self.formation.orders(standing, self.now)

    def settle(self) -> list[int]:
        """Carry out orders until none comes; return the ranks that are in the group."""
        for _ in range(100):
            orders = self.orders()
            for order in orders:
                for engine in self.engines.values():
                    engine.take(order)
            if not orders:
                if self.formation.orders_due == NEVER:
                    break
                self.now = self.formation.orders_due
        assert self.formation.plan is not None
        assert all(
            self.engines[member.rank].membership.status.members == self.formation.plan.members
            for member in self.formation.plan.members
        )
        return [member.rank for member in self.formation.plan.members]


def formed(regroup: Literal["shrink", "wait"] = "shrink") -> Group:
    group = Group(3, regroup)
    group.add(0, 1, 2)
    assert group.settle() == [0, 1, 2]
    return group


def test_the_first_group_waits_for_all_of_its_engines() -> None:
    group = Group(3)
    group.add(0, 2)
    assert group.orders() == []
    group.add(1)
    group.engines[1].loading = True
    assert group.orders() == [], "it cannot take part yet"
    group.engines[1].loading = False
    (order,) = group.orders()
    assert order == FormGroup(1, [GroupMember(rank, 1) for rank in range(3)])


def test_members_join_at_leader_address_once_all_have_prepared() -> None:
    group = Group(2)
    group.add(0, 1)
    (order,) = group.orders()
    group.engines[0].take(order)
    assert group.orders() == [], "one prepares"
    assert group.orders(after=REPEAT_INTERVAL) == [order], "it may not have heard"
    group.engines[1].take(order)
    (meet,) = group.orders()
    assert meet == FormGroup(1, order.members, "host:0")
    group.engines[0].take(meet)
    assert group.orders(after=REPEAT_INTERVAL) == [meet]
    group.engines[1].take(meet)
    assert group.orders(after=REPEAT_INTERVAL) == []
    assert group.formation.orders_due == NEVER


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_shrink_continues_without_lost_member_and_adds_its_successor(dead: int) -> None:
    group = formed()
    del group.engines[dead]
    others = sorted({0, 1, 2} - {dead})
    assert group.settle() == others
    group.add(dead, incarnation=2)
    group.engines[dead].loading = True
    assert group.orders() == [], "the others are not held up while it loads"
    group.engines[dead].loading = False
    assert group.settle() == [0, 1, 2]
    assert group.formation.plan is not None
    assert group.formation.plan.topology == 3


@pytest.mark.parametrize("dead", [0, 2])
def test_wait_policy_reforms_group_only_with_successor(dead: int) -> None:
    group = formed("wait")
    del group.engines[dead]
    assert group.orders() == []
    assert group.orders(after=60.0) == []
    group.add(dead, incarnation=2)
    assert group.settle() == [0, 1, 2]


def test_successor_is_not_mistaken_for_predecessor() -> None:
    group = formed()
    group.add(1, incarnation=2)
    group.engines[1].loading = True
    assert group.settle() == [0, 2]


@pytest.mark.parametrize("regroup", ["shrink", "wait"])
def test_newcomer_is_added_to_group(regroup: Literal["shrink", "wait"]) -> None:
    group = formed(regroup)
    group.add(3)
    assert group.settle() == [0, 1, 2, 3]


def test_newcomers_wait_until_the_group_has_formed() -> None:
    group = Group(2)
    group.add(0, 1)
    (order,) = group.orders()
    group.add(2)
    assert group.orders() == []
    for rank in (0, 1):
        group.engines[rank].take(order)
    assert group.orders()[0].members == order.members
    assert group.settle() == [0, 1, 2]


def test_survivors_are_not_grouped_with_dead_members() -> None:
    group = formed()
    for rank in (0, 2):
        group.engines[rank].membership.lost()
    group.now += 1
    assert group.orders() == [], "why they left is not known yet"
    del group.engines[1]
    (order,) = group.orders(after=REPLAN_DELAY / 2)
    assert [member.rank for member in order.members] == [0, 2]


def test_broken_group_without_deaths_is_reformed() -> None:
    group = formed()
    group.engines[1].membership.lost()
    assert group.settle() == [0, 1, 2]


def test_repeatedly_failing_formation_backs_off() -> None:
    group = Group(2)
    group.add(0, 1)
    plans: list[float] = []
    known = 0
    while len(plans) < 5:
        orders = group.orders()
        for order in orders:
            for engine in group.engines.values():
                if order.address:
                    engine.membership.lost()
                else:
                    engine.take(order)
            if order.topology > known:
                known = order.topology
                plans.append(group.now)
        if not orders:
            group.now = group.formation.orders_due
    pauses = [later - earlier for earlier, later in pairwise(plans)]
    assert pauses == pytest.approx([FIRST_PAUSE * 2**n for n in range(4)])


def test_member_dying_during_formation_is_excluded() -> None:
    group = Group(3)
    group.add(0, 1, 2)
    (order,) = group.orders()
    group.engines[0].take(order)
    del group.engines[1]
    group.now += 1
    assert group.settle() == [0, 2]


# -- a coordinator that has just been started ----------------------------------------------------


def test_new_coordinator_does_not_disturb_complete_group() -> None:
    group = formed()
    engines, group.engines = group.engines, {}
    group.restart_coordinator()
    for rank in (2, 0, 1):
        group.engines[rank] = engines[rank]
        assert group.orders(after=0.1) == []
    assert group.orders(after=2 * GRACE) == []
    assert group.formation.plan is not None
    assert group.formation.plan.topology == 1


def test_member_that_died_with_coordinator_is_removed_after_grace() -> None:
    group = formed()
    del group.engines[1]
    group.restart_coordinator()
    assert group.orders() == []
    assert group.orders(after=GRACE / 2) == []
    assert group.formation.orders_due <= group.now + GRACE / 2
    group.now += GRACE
    assert group.settle() == [0, 2]
    assert group.formation.plan is not None
    assert group.formation.plan.topology == 2


def test_engines_that_lost_their_group_without_a_coordinator_get_a_newer_one() -> None:
    group = formed()
    for engine in group.engines.values():
        engine.membership.lost()
    group.restart_coordinator()
    assert group.settle() == [0, 1, 2]
    assert group.formation.plan is not None
    assert group.formation.plan.topology == 2


def test_reported_topology_newer_than_plan_supersedes_it() -> None:
    group = formed()
    for engine in group.engines.values():
        engine.membership = GroupMembership(engine.member, "host:0")
        engine.take(FormGroup(7, [GroupMember(rank, 1) for rank in range(3)]))
        engine.membership.lost()
    group.now += 1
    assert group.settle() == [0, 1, 2]
    assert group.formation.plan is not None
    assert group.formation.plan.topology == 8
