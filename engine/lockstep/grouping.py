"""Carries out orders to form a lockstep group: prepare, join, leave."""

import logging
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from engine.batch.executor import GroupExecutor
from engine.distributed.spec import GroupBroken, GroupSpec, listener_address, open_listener
from engine.lockstep.group_membership import GroupAssignment, GroupMembership
from engine.shared.messages import FormGroup, GroupMember, GroupStatus

if TYPE_CHECKING:
    from engine.distributed.engines import EngineGroup

logger = logging.getLogger(__name__)


class GroupConnection:
    """Lets the receiver's thread abort a group that the loop's thread computes in.

    The loop attaches and detaches its group; the receiver reports the newest formation. Operations
    in a superseded group fail immediately, even if no member has died.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: EngineGroup | None = None
        self._newest = 0

    @property
    def is_superseded(self) -> bool:
        """Whether a newer group than the attached one has been ordered."""
        with self._lock:
            return self._group is not None and self._group.topology < self._newest

    def attach(self, group: "EngineGroup") -> None:
        """Record the engine's current group."""
        with self._lock:
            self._group = group
            self._abort_if_superseded()

    def detach(self) -> None:
        """Close the group's connections and forget it; idempotent."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def ordered(self, topology: int) -> None:
        """Record that the coordinator has ordered a group with this number."""
        with self._lock:
            self._newest = max(self._newest, topology)
            self._abort_if_superseded()

    def _abort_if_superseded(self) -> None:
        if self._group is not None and self._group.topology < self._newest:
            self._group.abort()


@dataclass(eq=False)
class Grouping:
    """Carries out one engine's group orders according to its `GroupMembership`.

    Args:
        host: name or address under which other members reach this process.
        timeout: seconds that members wait for each other, to join and in a collective.
        report: reports the engine's state in the group to the coordinator.
    """

    member: GroupMember
    executor: GroupExecutor
    connection: GroupConnection
    _: KW_ONLY
    host: str
    timeout: float
    report: Callable[[GroupStatus], None]

    def __post_init__(self) -> None:
        self._listener = open_listener(self.host)
        self._membership = GroupMembership(self.member, listener_address(self._listener))

    def announce(self) -> None:
        """Report to the coordinator that this engine is available for a group."""
        self.report(self._membership.status)

    def ordered(self, order: FormGroup) -> "EngineGroup | None":
        """Carry out an order; return the group if the engine has joined it."""
        before = self._membership.status
        assignment = self._membership.ordered(order)
        if self._membership.status != before:
            self.connection.detach()
            self.report(self._membership.status)
        if assignment is None:
            return None
        if assignment.address:
            return self._join(assignment)
        self._prepare(assignment)
        return None

    def leave_broken(self, error: GroupBroken) -> None:
        """Leave a broken group; the coordinator will form another."""
        if self.connection.is_superseded:
            logger.info("another group is being formed")
        else:
            logger.warning("%s", error)
        self.connection.detach()
        self._membership.lost()
        self.report(self._membership.status)

    def close(self) -> None:
        """Leave the group for good."""
        self.connection.detach()
        self._listener.close()

    def _prepare(self, assignment: GroupAssignment) -> None:
        self.executor.prepare_group(assignment.position, assignment.size)
        if self._listener.fileno() < 0:  # it was used for the previous group
            self._listener = open_listener(self.host)
        self._membership.prepared(listener_address(self._listener))
        self.report(self._membership.status)

    def _join(self, assignment: GroupAssignment) -> "EngineGroup | None":
        topology, position, size, address = assignment
        spec = GroupSpec(address, position, size, topology, self.timeout)
        is_leader = position == 0
        try:
            group = self.executor.join_group(spec, self._listener if is_leader else None)
        except GroupBroken as error:
            self.leave_broken(error)
            return None
        self.connection.attach(group)
        self._membership.joined()
        self.report(self._membership.status)
        return group
