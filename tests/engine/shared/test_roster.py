"""Membership lists across restarts of the coordinator."""

from typing import NamedTuple

from engine.shared.roster import Change, Roster


class Member(NamedTuple):
    incarnation: int


def test_newcomers_and_leavers_are_reported_once() -> None:
    roster: Roster[Member] = Roster(grace=5)
    assert roster.update(1, {0: Member(10), 1: Member(11)}, now=0) == Change([0, 1], [])
    assert roster.update(1, {0: Member(10), 1: Member(11)}, now=1) == Change([], [])
    assert roster.update(1, {1: Member(11)}, now=2) == Change([], [0])


def test_a_replaced_member_leaves_and_joins() -> None:
    roster: Roster[Member] = Roster(grace=5)
    roster.update(1, {0: Member(10)}, now=0)
    assert roster.update(1, {0: Member(20)}, now=1) == Change([0], [0])
    assert roster.members == {0: Member(20)}


def test_empty_view_of_restarted_coordinator_loses_no_member() -> None:
    roster: Roster[Member] = Roster(grace=5)
    roster.update(1, {0: Member(10), 1: Member(11)}, now=0)
    assert roster.update(2, {}, now=1) == Change([], [])
    assert roster.update(2, {0: Member(10)}, now=2) == Change([], [])
    assert roster.expire(now=5.9) == []
    assert roster.expire(now=6.1) == [1]
    assert roster.members == {0: Member(10)}


def test_a_member_that_the_new_epoch_listed_once_leaves_at_once() -> None:
    roster: Roster[Member] = Roster(grace=5)
    roster.update(1, {0: Member(10)}, now=0)
    roster.update(2, {0: Member(10)}, now=1)
    assert roster.update(2, {}, now=1.1) == Change([], [0])


def test_member_returning_within_grace_stays() -> None:
    roster: Roster[Member] = Roster(grace=5)
    roster.update(1, {0: Member(10)}, now=0)
    roster.update(2, {}, now=1)
    roster.update(2, {0: Member(10)}, now=3)
    assert roster.expire(now=100) == []


def test_grace_period_restarts_when_member_is_heard() -> None:
    roster: Roster[Member] = Roster(grace=5)
    roster.update(1, {0: Member(10), 1: Member(11)}, now=0)
    roster.update(2, {}, now=1)
    roster.record_alive(0, now=4)
    assert roster.expire(now=7) == [1]
    assert roster.expire(now=8) == []
    assert roster.expire(now=10) == [0]
