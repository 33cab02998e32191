"""One engine's place in its lockstep group, from the orders it gets."""

import pytest

from engine.lockstep.seat import GroupSeat, Place
from engine.shared.messages import FormGroup, GroupMember, Seat

ME, PEER, STRANGER = GroupMember(1, 11), GroupMember(0, 10), GroupMember(1, 12)
HERE = "127.0.0.1:999"
THERE = "127.0.0.1:1000"


@pytest.fixture
def seat() -> GroupSeat:
    return GroupSeat(ME, HERE)


def join(seat: GroupSeat, topology: int = 1) -> None:
    seat.ordered(FormGroup(topology, [PEER, ME]))
    seat.prepared(HERE)
    seat.ordered(FormGroup(topology, [PEER, ME], THERE))
    seat.joined()


def test_a_group_is_prepared_for_then_joined(seat: GroupSeat) -> None:
    assert seat.seat == Seat("apart", 0, HERE)
    assert seat.ordered(FormGroup(1, [PEER, ME])) == Place(1, 1, 2)
    assert seat.seat == Seat("preparing", 1, HERE)
    seat.prepared(HERE)
    assert seat.seat == Seat("prepared", 1, HERE)
    assert seat.ordered(FormGroup(1, [PEER, ME], THERE)) == Place(1, 1, 2, THERE)
    seat.joined()
    assert seat.seat == Seat("joined", 1, HERE, [PEER, ME])
    assert seat.is_joined


def test_repeated_and_older_orders_change_nothing(seat: GroupSeat) -> None:
    join(seat, 2)
    for order in (
        FormGroup(2, [PEER, ME]),
        FormGroup(2, [PEER, ME], THERE),
        FormGroup(1, [ME]),
        FormGroup(1, [PEER]),
    ):
        assert seat.ordered(order) is None
        assert seat.is_joined


def test_an_order_with_an_address_that_comes_too_early_is_prepared_for_first(
    seat: GroupSeat,
) -> None:
    assert seat.ordered(FormGroup(1, [PEER, ME], THERE)) == Place(1, 1, 2)
    assert seat.seat.state == "preparing"
    assert seat.ordered(FormGroup(1, [PEER, ME], THERE)) is None, "it is not prepared yet"


def test_a_newer_order_ends_a_group(seat: GroupSeat) -> None:
    join(seat)
    assert seat.ordered(FormGroup(3, [ME])) == Place(3, 0, 1)
    assert not seat.is_joined


@pytest.mark.parametrize("members", [[PEER], [PEER, STRANGER]])
def test_a_group_without_this_process_leaves_it_apart(
    seat: GroupSeat, members: list[GroupMember]
) -> None:
    join(seat)
    assert seat.ordered(FormGroup(2, members)) is None
    assert seat.seat == Seat("apart", 2, HERE)


def test_a_lost_group_is_told_with_its_number(seat: GroupSeat) -> None:
    join(seat, 4)
    seat.lost()
    assert seat.seat == Seat("apart", 4, HERE)
    assert seat.ordered(FormGroup(4, [PEER, ME], THERE)) is None, "it is over"
    assert seat.ordered(FormGroup(5, [PEER, ME])) == Place(5, 1, 2)
