"""An engine's membership in its lockstep group, driven by orders."""

import pytest

from engine.lockstep.group_membership import GroupAssignment, GroupMembership
from engine.shared.messages import FormGroup, GroupMember, GroupStatus

ME, PEER, STRANGER = GroupMember(1, 11), GroupMember(0, 10), GroupMember(1, 12)
HERE = "127.0.0.1:999"
THERE = "127.0.0.1:1000"


@pytest.fixture
def membership() -> GroupMembership:
    return GroupMembership(ME, HERE)


def join(membership: GroupMembership, topology: int = 1) -> None:
    membership.ordered(FormGroup(topology, [PEER, ME]))
    membership.prepared(HERE)
    membership.ordered(FormGroup(topology, [PEER, ME], THERE))
    membership.joined()


def test_a_group_is_prepared_for_then_joined(membership: GroupMembership) -> None:
    assert membership.status == GroupStatus("apart", 0, HERE)
    assert membership.ordered(FormGroup(1, [PEER, ME])) == GroupAssignment(1, 1, 2)
    assert membership.status == GroupStatus("preparing", 1, HERE)
    membership.prepared(HERE)
    assert membership.status == GroupStatus("prepared", 1, HERE)
    assert membership.ordered(FormGroup(1, [PEER, ME], THERE)) == GroupAssignment(1, 1, 2, THERE)
    membership.joined()
    assert membership.status == GroupStatus("joined", 1, HERE, [PEER, ME])
    assert membership.status.state == "joined"


def test_repeated_and_older_orders_change_nothing(membership: GroupMembership) -> None:
    join(membership, 2)
    for order in (
        FormGroup(2, [PEER, ME]),
        FormGroup(2, [PEER, ME], THERE),
        FormGroup(1, [ME]),
        FormGroup(1, [PEER]),
    ):
        assert membership.ordered(order) is None
        assert membership.status.state == "joined"


def test_early_order_with_address_is_prepared_for_first(
    membership: GroupMembership,
) -> None:
    assert membership.ordered(FormGroup(1, [PEER, ME], THERE)) == GroupAssignment(1, 1, 2)
    assert membership.status.state == "preparing"
    assert membership.ordered(FormGroup(1, [PEER, ME], THERE)) is None, "it is not prepared yet"


def test_a_newer_order_ends_a_group(membership: GroupMembership) -> None:
    join(membership)
    assert membership.ordered(FormGroup(3, [ME])) == GroupAssignment(3, 0, 1)
    assert membership.status.state != "joined"


@pytest.mark.parametrize("members", [[PEER], [PEER, STRANGER]])
def test_process_outside_new_group_stays_apart(
    membership: GroupMembership, members: list[GroupMember]
) -> None:
    join(membership)
    assert membership.ordered(FormGroup(2, members)) is None
    assert membership.status == GroupStatus("apart", 2, HERE)


def test_a_lost_group_is_reported_with_its_number(membership: GroupMembership) -> None:
    join(membership, 4)
    membership.lost()
    assert membership.status == GroupStatus("apart", 4, HERE)
    assert membership.ordered(FormGroup(4, [PEER, ME], THERE)) is None, "it is over"
    assert membership.ordered(FormGroup(5, [PEER, ME])) == GroupAssignment(5, 1, 2)
