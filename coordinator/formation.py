"""Formation of the lockstep group, decided from the state that each engine reports.

The engines of a group join, prepare and leave together. `GroupFormation` compares what every
engine reports (its `GroupStatus`, part of every heartbeat) with the newest plan and makes another
one when an engine is missing, has left or is new. A plan is published until all its members have
joined: first without an address (they leave their current group and load their share of the
experts), then with the leader's address, once all are prepared. So no single message is critical,
and a restarted coordinator reconstructs its predecessor's plan from the statuses.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from coordinator.members import Member
from engine.shared.messages import FormGroup, GroupMember, GroupStatus

REPEAT_INTERVAL = 0.1
"""Seconds between publications of a plan that some member is not known to follow."""

REPLAN_DELAY = 0.05
"""Seconds from members leaving their group to a new plan: enough for a supervisor to report the
death that caused it."""

FIRST_PAUSE = 0.1
"""Seconds from a failed plan to the next; doubles with every further failure."""

MAX_PAUSE = 5.0

NEVER = float("inf")

Regroup = Literal["shrink", "wait"]


class GroupFormation:
    """Plans of one lockstep group, each with a larger topology than the one before."""

    def __init__(self, size: int, regroup: Regroup, grace: float) -> None:
        """Start with no known engines.

        Args:
            size: the first group is formed when ranks 0 to size - 1 are registered.
            regroup: "shrink" continues without an engine that died, "wait" waits for its successor.
            grace: seconds for members of a group that a predecessor formed to register.
        """
        self.plan: FormGroup | None = None
        self._regroup = regroup
        self._grace = grace
        self._topology = 0
        self._expected = set(range(size))
        """Ranks that belong to the group, registered or not."""
        self._unseen: set[int] = set()
        """Members of a predecessor's plan that have not registered here yet."""
        self._unseen_until = NEVER
        self._engines: Mapping[int, Member] = {}
        self._left_at: float | None = None
        """When members of the plan were first seen to have left it, with all still registered."""
        self._plan_at = 0.0
        self._pause = 0.0
        self._publish_at = NEVER

    @property
    def orders_due(self) -> float:
        """Latest time of the next call of `orders`."""
        return min(self._publish_at, self._unseen_until if self._unseen else NEVER)

    def left(self, rank: int) -> None:
        """Stop waiting for the rank of an engine that was removed deliberately."""
        self._expected.discard(rank)

    def orders(self, engines: Mapping[int, Member], now: float) -> list[FormGroup]:
        """Return the plans to publish at `now` (seconds, monotonic), given all engines."""
        self._engines = engines
        self._learn(now)
        breach = self._breach(now)
        if breach != "left":
            self._left_at = None
        elif self._left_at is None:
            self._left_at = now
        planned = {member.rank for member in self._members()}
        has_newcomers = self._is_complete() and not {m.rank for m in self._candidates()} <= planned
        if self.plan is None or breach or has_newcomers:
            self._publish_at = self._make_plan(now)
            if self._publish_at > now:
                return []
        assert self.plan is not None
        if not self.plan.address and self._all_are("prepared"):
            self._publish_at = now
            leader = self._group_status(self.plan.members[0])
            assert leader is not None
            self.plan = FormGroup(self._topology, self.plan.members, leader.address)
        if self._is_complete():
            self._publish_at, self._pause = NEVER, 0.0
            return []
        if now < self._publish_at:
            return []
        self._publish_at = now + REPEAT_INTERVAL
        return [self.plan]

    # -- reported statuses -------------------------------------------------------------------------

    def _learn(self, now: float) -> None:
        """Adopt the topology and plan that engines know from a previous coordinator."""
        statuses = [e.group_status for e in self._engines.values() if e.group_status is not None]
        newest = max((group_status.topology for group_status in statuses), default=0)
        if newest > self._topology:
            self._topology = newest
            joined = [s for s in statuses if s.state == "joined" and s.topology == newest]
            self.plan = FormGroup(newest, joined[0].members) if joined else None
            if joined:
                self._expected = {member.rank for member in joined[0].members}
            self._unseen = set(self._expected)
            self._unseen_until = now + self._grace
        self._unseen -= set(self._engines)

    def _group_status(self, member: GroupMember) -> GroupStatus | None:
        engine = self._engines.get(member.rank)
        return engine.group_status if engine and engine.incarnation == member.incarnation else None

    def _members(self) -> Iterable[GroupMember]:
        return self.plan.members if self.plan is not None else ()

    def _breach(self, now: float) -> Literal["unregistered", "left"] | None:
        """Return "unregistered" if the plan has such a member, "left" if a member has left."""
        breach: Literal["left"] | None = None
        for member in self._members():
            if member.rank in self._unseen and now < self._unseen_until:
                continue
            engine = self._engines.get(member.rank)
            if engine is None or engine.incarnation != member.incarnation:
                return "unregistered"
            group_status = engine.group_status
            if (
                group_status is not None
                and group_status.state == "apart"
                and group_status.topology == self._topology
            ):
                breach = "left"
        return breach

    def _all_are(self, state: str) -> bool:
        statuses = [self._group_status(member) for member in self._members()]
        return all(
            s is not None and (s.state, s.topology) == (state, self._topology) for s in statuses
        )

    def _is_complete(self) -> bool:
        return self._all_are("joined")

    # -- plans -----------------------------------------------------------------------------------

    def _candidates(self) -> list[GroupMember]:
        return [
            GroupMember(rank, engine.incarnation)
            for rank, engine in sorted(self._engines.items())
            if engine.group_status is not None
        ]

    def _make_plan(self, now: float) -> float:
        """Plan a group of all candidates; return when to publish it, or when to try again."""
        members = self._candidates()
        ranks = {member.rank for member in members}
        waits = self._topology == 0 or self._regroup == "wait"
        is_early = bool(self._unseen) and now < self._unseen_until
        if not ranks or is_early or (waits and not ranks >= self._expected):
            return NEVER
        replan_at = now if self._left_at is None else self._left_at + REPLAN_DELAY
        earliest = max(replan_at, self._plan_at)
        if now < earliest:
            return earliest
        self._topology += 1
        self.plan = FormGroup(self._topology, members)
        self._expected |= ranks
        self._unseen = set()
        self._pause = min(MAX_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._plan_at = now + self._pause
        return now
