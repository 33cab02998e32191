"""Copies of KV blocks offered to other engines. No I/O, no clock.

Since they are copies, the KV cache blocks are free as soon as their request ends, whatever happens
to the readers.
"""

from collections import OrderedDict
from itertools import takewhile
from typing import NamedTuple


class _Offer(NamedTuple):
    content: bytes
    readers: int
    until: float


class Offers:
    """Keeps each block until it was read as often as offered, for a limited time.

    Blocks that were offered several times are evicted for new ones: they are shared prompt
    prefixes, which most readers already have by then. Others are never evicted; a block that does
    not fit is rejected. So of a prompt that is too long the beginning is kept, which is usable
    alone.

    Args:
        max_bytes: limit for all contents.
        seconds: how long a block waits for its readers after the last offer.
    """

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._once: OrderedDict[bytes, _Offer] = OrderedDict()
        """Blocks offered once; in both, the first to expire come first."""
        self._again: OrderedDict[bytes, _Offer] = OrderedDict()
        """Blocks offered again while present."""
        self.num_bytes = 0
        """Total size of all contents."""

    def renew(self, key: bytes, now: float) -> bool:
        """Offer a block to one more reader; return False if it is not present."""
        offer = self._once.pop(key, None) or self._again.pop(key, None)
        if offer is None:
            return False
        self._again[key] = _Offer(offer.content, offer.readers + 1, now + self._seconds)
        return True

    def put(self, key: bytes, content: bytes, now: float) -> bool:
        """Offer an absent block to one reader; return False if there is no room."""
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
        """Return a block's content, or None; it is dropped after the last reader."""
        offer = self._once.get(key) or self._again.get(key)
        if offer is None:
            return None
        if offer.readers > 1:
            self._again[key] = offer._replace(readers=offer.readers - 1)  # keeps its place
        else:
            self._forget(key)
        return offer.content

    def expire(self, now: float) -> int:
        """Drop expired blocks; return their number."""
        late = [
            key
            for offers in (self._once, self._again)
            for key, _ in takewhile(lambda each: each[1].until <= now, offers.items())
        ]
        for key in late:
            self._forget(key)
        return len(late)

    def clear(self) -> None:
        """Drop all blocks."""
        self._once.clear()
        self._again.clear()
        self.num_bytes = 0

    def _forget(self, key: bytes) -> None:
        offers = self._once if key in self._once else self._again
        self.num_bytes -= len(offers.pop(key).content)
