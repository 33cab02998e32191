"""Answers that are shown as a whole: their deltas are summed up."""

from server.generate.answer import DeltaSum
from server.generate.fold import Delta

_LARGE = 2000
"""Tokens and scores of answers from which on JSON is made beside the event loop."""


class WholeAnswers:
    """The sums of all sequences of a request."""

    def __init__(self, count: int) -> None:
        self._sums = [DeltaSum() for _ in range(count)]

    def add(self, index: int, delta: Delta) -> bytes:
        """Add a delta of a sequence; there is nothing to show of it yet."""
        self._sums[index].add(delta)
        return b""

    @property
    def large(self) -> bool:
        """Whether to show them takes more than a moment."""
        return sum([one.size for one in self._sums]) > _LARGE

    def answers(self) -> list[Delta]:
        """Return all answers in order, and forget them."""
        sums, self._sums = self._sums, []
        return [one.whole() for one in sums]
