"""How many bytes of unfinished request bodies a node holds: a bound over all its front ends."""

from server.access.admission_table import AdmissionTable

FREE_BYTES = 2**16
"""What a body may have without being counted: most are complete with the first read."""


class NoRoomForBody(Exception):
    """The node holds as many bytes of bodies as it may (HTTP 503)."""


class HeldBody:
    """The bytes of one body that is being received; `release` must be called whatever happens."""

    __slots__ = ("_budget", "_counted", "_size")

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self._size = 0
        self._counted = 0

    def grow(self, size: int) -> None:
        """So many bytes more have come.

        Raises:
            NoRoomForBody: the node has no room for them.
        """
        self._size += size
        if self._size > FREE_BYTES:
            more = self._size - self._counted
            self._counted = self._size
            self._budget.take(more, self._counted)

    def release(self) -> None:
        """Give everything back; idempotent."""
        self._budget.give_back(self._counted)
        self._counted = 0


class BodyBudget:
    """Counts bodies that are being received on this node, in the table that front ends share."""

    def __init__(self, table: AdmissionTable, most: int) -> None:
        self._table = table
        self._max = most

    def hold(self) -> HeldBody:
        """Return the place of a body of which nothing has come yet."""
        return HeldBody(self)

    def take(self, more: int, own: int) -> None:
        """Count `more` bytes of a body that then has `own`.

        They stay counted in any case, until they are given back. A body that is larger than all
        room is taken when it is alone.

        Raises:
            NoRoomForBody: there is no room.
        """
        table = self._table
        table.add_body_bytes(more)
        if self._full(own) and not (table.drop_dead() and not self._full(own)):
            raise NoRoomForBody

    def _full(self, own: int) -> bool:
        total = self._table.body_bytes()
        return total > self._max and total > own

    def give_back(self, size: int) -> None:
        """These bytes are held no longer."""
        if size:
            self._table.add_body_bytes(-size)
