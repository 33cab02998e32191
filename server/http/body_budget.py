"""How many bytes of request bodies are held.

Unfinished ones have a bound over all front ends of a node, those of requests that are not answered
yet another in each front end.
"""

from server.access.admission_table import AdmissionTable

FREE_BYTES = 2**12
"""What a body may have without being counted, so that as many as there are connections fit."""
KEPT_TIMES = 4
"""How many times the room of unfinished bodies there is for those of requests that wait or run."""


class NoRoomForBody(Exception):
    """The node holds its maximum of request bytes (HTTP 503)."""


class HeldBody:
    """The bytes of one body that is being received; `release` must be called whatever happens."""

    __slots__ = ("_budget", "_counted", "_size")

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self._size = 0
        self._counted = 0

    def grow(self, size: int) -> None:
        """Count `size` more bytes that have been received.

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
        self._kept = 0
        """Bytes of complete bodies, here."""

    def hold(self) -> HeldBody:
        """Return the account of a body of which nothing has been received yet."""
        return HeldBody(self)

    def take(self, more: int, own: int) -> None:
        """Count `more` bytes of a body, which has `own` with them.

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

    def keep(self, size: int) -> int:
        """Count a complete body, of which its request is made; return what `drop` has to get.

        Raises:
            NoRoomForBody: requests that are not answered yet hold as much as they may. A body that
                is larger than all room is taken when it is alone.
        """
        if size <= FREE_BYTES:
            return 0
        if self._kept and self._kept + size > KEPT_TIMES * self._max:
            raise NoRoomForBody
        self._kept += size
        return size

    def drop(self, size: int) -> None:
        """The request of such a body has ended."""
        self._kept -= size

    def give_back(self, size: int) -> None:
        """Stop counting bytes."""
        if size:
            self._table.add_body_bytes(-size)
