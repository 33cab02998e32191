"""Limits on the request body bytes held in memory.

Incomplete bodies are limited over all front ends of a node; bodies of requests without an answer
yet are limited separately in each front end.
"""

from server.access.admission_table import AdmissionTable

FREE_BYTES = 2**12
"""Uncounted bytes per body, small enough for every connection to have them."""
COMPLETE_BODIES_FACTOR = 4
"""Limit for complete bodies of waiting and running requests, as a multiple of the other limit."""


class NoRoomForBody(Exception):
    """The node holds the maximum of request body bytes (HTTP 503)."""


class ReceivedBody:
    """The bytes of one body that is being received; `release` must always be called."""

    __slots__ = ("_budget", "_counted", "_size")

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self._size = 0
        self._counted = 0

    def grow(self, size: int) -> None:
        """Count `size` more received bytes.

        Raises:
            NoRoomForBody: the node's limit is exceeded.
        """
        self._size += size
        if self._size > FREE_BYTES:
            more = self._size - self._counted
            self._counted = self._size
            self._budget.take(more, self._counted)

    def release(self) -> None:
        """Release all counted bytes; idempotent."""
        self._budget.release(self._counted)
        self._counted = 0


class BodyBudget:
    """Counts bodies that are being received on this node, in the front ends' shared table."""

    def __init__(self, table: AdmissionTable, limit: int) -> None:
        self._table = table
        self._max = limit
        self._complete_bytes = 0
        """Bytes of complete bodies in this front end."""

    def hold(self) -> ReceivedBody:
        """Return the account of a new body."""
        return ReceivedBody(self)

    def take(self, more: int, own: int) -> None:
        """Count `more` bytes of a body that now has `own` in total.

        They stay counted, even on error, until `release`. A body larger than the limit is
        accepted if it is the only one.

        Raises:
            NoRoomForBody: the limit is exceeded.
        """
        table = self._table
        table.add_body_bytes(more)
        if self._full(own) and not (table.drop_dead() and not self._full(own)):
            raise NoRoomForBody

    def _full(self, own: int) -> bool:
        total = self._table.body_bytes()
        return total > self._max and total > own

    def keep(self, size: int) -> int:
        """Count a complete body; return the size to pass to `drop`.

        Raises:
            NoRoomForBody: the limit is exceeded. A body larger than the limit is accepted if it is
                the only one.
        """
        if size <= FREE_BYTES:
            return 0
        if (
            self._complete_bytes
            and self._complete_bytes + size > COMPLETE_BODIES_FACTOR * self._max
        ):
            raise NoRoomForBody
        self._complete_bytes += size
        return size

    def drop(self, size: int) -> None:
        """Stop counting a complete body."""
        self._complete_bytes -= size

    def release(self, size: int) -> None:
        """Stop counting bytes of an incomplete body."""
        if size:
            self._table.add_body_bytes(-size)
