"""One engine's place in its lockstep group: a state machine without I/O.

    apart      in no group: just started, or the group was given up
      |  order without address
    preparing  loads the share of the experts that the new place has
      |  `prepared`
    prepared   waits for the others
      |  order with address, then `joined`
    joined     takes part; a newer order, or `lost`, ends it

The coordinator forms groups from what engines say of themselves: `status` is part of every
heartbeat, and goes out at once when it changes.
"""

from typing import NamedTuple

from engine.shared.messages import FormGroup, GroupMember, GroupStatus


class Place(NamedTuple):
    """A place in one formation of a group."""

    topology: int
    position: int
    size: int
    address: str = ""
    """Where the members meet; empty while they prepare."""


class GroupMembership:
    """What an engine does with the orders to form a group."""

    def __init__(self, member: GroupMember, address: str) -> None:
        """An engine that is in no group; it would host the meeting of one at `address`."""
        self.status = GroupStatus("apart", 0, address)
        self._me = member
        self._members: list[GroupMember] = []

    def ordered(self, order: FormGroup) -> Place | None:
        """Take an order; return the place to prepare for (without an address) or to take."""
        status = self.status
        if order.topology < status.topology:
            return None
        if self._me not in order.members:
            if order.topology > status.topology:
                self._move("apart", order.topology)  # the others go on without this one
            return None
        place = Place(
            order.topology, order.members.index(self._me), len(order.members), order.address
        )
        if order.topology > status.topology:
            self._members = order.members
            self._move("preparing", order.topology)
            return place._replace(address="")
        return place if order.address and status.state == "prepared" else None

    def prepared(self, address: str) -> None:
        """What the new place needs has been loaded; the group could meet at `address`."""
        self.status = GroupStatus("prepared", self.status.topology, address)

    def joined(self) -> None:
        """All members have met."""
        self._move("joined", self.status.topology)

    def lost(self) -> None:
        """The group is given up, or the members did not meet."""
        self._move("apart", self.status.topology)

    def _move(self, state: str, topology: int) -> None:
        members = self._members if state == "joined" else []
        self.status = GroupStatus(state, topology, self.status.address, members)  # type: ignore[arg-type]
