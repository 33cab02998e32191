"""Who gets which number, also from a coordinator that has just started and knows nobody."""

import pytest

from coordinator.members import MAX_WAIT, NumberAssignment
from engine.shared.messages import Hello, Refused

GRACE = 5.0


def hello(index: int, incarnation: int) -> Hello:
    return Hello("front_end", index, incarnation, "h", 1)


@pytest.fixture
def numbers() -> NumberAssignment:
    made = NumberAssignment(GRACE)
    made.start(100.0)
    return made


def test_no_number_is_assigned_until_earlier_members_had_time_to_report(
    numbers: NumberAssignment,
) -> None:
    refused = numbers.number_for(hello(-1, 9), {}, 100.0 + GRACE - 0.1)
    assert isinstance(refused, Refused)
    assert not refused.final
    assert "5 s" in refused.reason
    assert numbers.number_for(hello(0, 5), {}, 101.0) == 0
    assert numbers.number_for(hello(-1, 9), {0: 5}, 100.0 + GRACE) == 1


def test_members_that_have_a_number_do_not_wait(numbers: NumberAssignment) -> None:
    assert numbers.number_for(hello(3, 9), {}, 100.0) == 3
    assert numbers.number_for(hello(-1, 9), {3: 9}, 100.0) == 3


def test_number_is_assigned_within_join_timeout() -> None:
    numbers = NumberAssignment(3600.0)
    numbers.start(0.0)
    assert numbers.number_for(hello(-1, 9), {}, MAX_WAIT) == 0


def test_first_coordinator_of_cluster_assigns_numbers_at_once() -> None:
    numbers = NumberAssignment(0.0)
    numbers.start(100.0)
    assert numbers.number_for(hello(-1, 9), {}, 100.0) == 0
