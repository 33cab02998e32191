"""One engine's state in its lockstep group: a state machine without I/O.

  apart      in no group: just started, or the group was given up
   |  order without address
  preparing  loads the experts of its position in the new group
   |  `prepared`
  prepared   waits for the other members
   |  order with address, then `joined`
  joined     takes part until a newer order or `lost`

The coordinator forms groups from the engines' reports: `status` is part of every heartbeat, and is
sent immediately when it changes.
"""

from typing import NamedTuple

from engine.shared.messages import FormGroup, GroupMember, GroupStatus


class GroupAssignment(NamedTuple):
    """An engine's position in one formation of a group."""

    topology: int
    position: int
    size: int
    address: str = ""
    """Address of the rendezvous; empty while members prepare."""


class GroupMembership:
    """Handles orders to form a group."""

    def __init__(self, member: GroupMember, address: str) -> None:
        """Start in no group; if this engine leads one, it would host the rendezvous at
        `address`."""
        self.status = GroupStatus("apart", 0, address)
        self._member = member
        self._members: list[GroupMember] = []

    def ordered(self, order: FormGroup) -> GroupAssignment | None:
        """Process an order; return the position to prepare (without address) or to join, if any."""
        status = self.status
        if order.topology < status.topology:
            return None
        if self._member not in order.members:
            if order.topology > status.topology:
                self._set_state("apart", order.topology)  # the new group excludes this engine
            return None
        assignment = GroupAssignment(
            order.topology, order.members.index(self._member), len(order.members), order.address
        )
        if order.topology > status.topology:
            self._members = order.members
            self._set_state("preparing", order.topology)
            return assignment._replace(address="")
        return assignment if order.address and status.state == "prepared" else None

    def prepared(self, address: str) -> None:
        """Record that the new position is prepared; the rendezvous could be at `address`."""
        self.status = GroupStatus("prepared", self.status.topology, address)

    def joined(self) -> None:
        """Record that all members have joined."""
        self._set_state("joined", self.status.topology)

    def lost(self) -> None:
        """Record that the group was given up, or could not be joined."""
        self._set_state("apart", self.status.topology)

    def _set_state(self, state: str, topology: int) -> None:
        members = self._members if state == "joined" else []
        self.status = GroupStatus(state, topology, self.status.address, members)  # type: ignore[arg-type]
