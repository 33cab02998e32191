"""Copies of KV blocks that other engines will read. No I/O, no clock.

They are copies, so the blocks of the KV cache are free as soon as their request ends, whatever
becomes of those who wanted to read them.
"""

from collections import OrderedDict
from itertools import takewhile
from typing import NamedTuple


class _Offer(NamedTuple):
    content: bytes
    readers: int
    until: float


class Offers:
    """Keeps each block until it was read as often as it was offered, at most for some seconds.

    Blocks that were offered several times make room for others: the beginnings of many prompts,
    which their readers mostly have by then. No other block does: one that does not fit is not
    taken. So of a prompt that is too long its beginning stays, which is of use without the rest.

    Args:
        max_bytes: limit for all contents.
        seconds: how long a block waits for its readers after it was offered last.
    """

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._once: OrderedDict[bytes, _Offer] = OrderedDict()
        """Those that were offered once; in both the first to expire are first."""
        self._again: OrderedDict[bytes, _Offer] = OrderedDict()
        """Those that were offered again while they were there."""
        self.num_bytes = 0
        """Of all contents."""

    def renew(self, key: bytes, now: float) -> bool:
        """Offer a block to one reader more; False if it is not there."""
        offer = self._once.pop(key, None) or self._again.pop(key, None)
        if offer is None:
            return False
        self._again[key] = _Offer(offer.content, offer.readers + 1, now + self._seconds)
        return True

    def put(self, key: bytes, content: bytes, now: float) -> bool:
        """Offer a block that is not there to one reader; False if there is no room for it."""
        assert key not in self._once
        assert key not in self._again
        while self.num_bytes + len(content) > self._max_bytes:
            if not self._again:
                return False
            self._forget(next(iter(self._again)))
        self._once[key] = _Offer(content, 1, now + self._seconds)
        self.num_bytes += len(content)
        return True

    def read(self, key: bytes) -> bytes | None:
        """Return a block's content, or None; after the last reader it is gone."""
        offer = self._once.get(key) or self._again.get(key)
        if offer is None:
            return None
        if offer.readers > 1:
            self._again[key] = offer._replace(readers=offer.readers - 1)  # its place stays
        else:
            self._forget(key)
        return offer.content

    def expire(self, now: float) -> int:
        """Forget what has waited for too long; return how many blocks."""
        late = [
            key
            for offers in (self._once, self._again)
            for key, _ in takewhile(lambda each: each[1].until <= now, offers.items())
        ]
        for key in late:
            self._forget(key)
        return len(late)

    def clear(self) -> None:
        """Forget all blocks."""
        self._once.clear()
        self._again.clear()
        self.num_bytes = 0

    def _forget(self, key: bytes) -> None:
        offers = self._once if key in self._once else self._again
        self.num_bytes -= len(offers.pop(key).content)
