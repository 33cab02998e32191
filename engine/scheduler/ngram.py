"""Draft tokens from n-grams: what followed the same tokens earlier in the sequence."""

from array import array
from collections.abc import Sequence

_MAX_CANDIDATES = 8
"""Maximum earlier occurrences that are compared, newest first."""


class NgramIndex:
    """Finds where the last tokens of one sequence occurred before; grows with the sequence.

    Occurrences of the same `shortest` tokens form a chain, newest first, as in the hash chains of
    LZ77 compressors (RFC 1951, section 4), so that a token costs one look-up to add.
    """

    __slots__ = ("_earlier", "_longest", "_newest", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        """Look for matches of at least `shortest` tokens; more than `longest` are not compared."""
        self._shortest = shortest
        self._longest = longest
        self._newest: dict[tuple[int, ...], int] = {}
        """Position after the newest occurrence of so many tokens."""
        self._earlier = array("q")
        """For each position from `shortest` on the one before it in its chain, or -1."""

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that may follow, or none where the last ones are new.

        Of the earlier occurrences the one that agrees furthest back is continued, and of those
        the newest. A continuation that reaches the end of the sequence goes on with itself.

        Args:
            token_ids: the whole sequence; from call to call it only grows.
            count: at least 1.
        """
        self._extend(token_ids)
        end = len(token_ids)
        if end < self._shortest:
            return []
        best, best_length = -1, 0
        position = self._newest.get(tuple(token_ids[end - self._shortest :]), -1)
        for _ in range(_MAX_CANDIDATES):
            if position < 0 or best_length == self._longest:
                break
            length = self._agreement(token_ids, position)
            if length > best_length:
                best, best_length = position, length
            position = self._earlier[position - self._shortest]
        if best < 0:
            return []
        period = end - best
        return [token_ids[best + offset % period] for offset in range(count)]

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Enter every position whose token has become known."""
        size, newest, earlier = self._shortest, self._newest, self._earlier
        for position in range(len(earlier) + size, len(token_ids)):
            key = tuple(token_ids[position - size : position])
            earlier.append(newest.get(key, -1))
            newest[key] = position

    def _agreement(self, token_ids: Sequence[int], position: int) -> int:
        """Return how many tokens before `position` are those at the end of the sequence."""
        length, end = self._shortest, len(token_ids)
        longest = min(self._longest, position)
        while length < longest and token_ids[position - length - 1] == token_ids[end - length - 1]:
            length += 1
        return length
