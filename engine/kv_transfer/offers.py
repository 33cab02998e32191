"""Copies of KV blocks that other engines will read. No I/O, no clock.

They are copies, so the blocks of the KV cache are free as soon as their request ends, whatever
becomes of those who wanted to read them.
"""

from collections import OrderedDict
from typing import NamedTuple


class _Offer(NamedTuple):
    content: bytes
    readers: int
    until: float


class Offers:
    """Keeps each block until it was read as often as it was offered, at most for some seconds.

    No block makes room for another: one that does not fit is not taken. So of a prompt that is too
    long its beginning stays, which is of use without the rest.

    Args:
        max_bytes: limit for all contents.
        seconds: how long a block waits for its readers after it was offered last.
    """

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._offers: OrderedDict[bytes, _Offer] = OrderedDict()
        """The first to expire first."""
        self.num_bytes = 0
        """Of all contents."""

    @property
    def next_end(self) -> float | None:
        """When `expire` has something to do."""
        return next(iter(self._offers.values())).until if self._offers else None

    def renew(self, key: bytes, now: float) -> bool:
        """Offer a block to one reader more; False if it is not there."""
        offer = self._offers.pop(key, None)
        if offer is None:
            return False
        self._offers[key] = _Offer(offer.content, offer.readers + 1, now + self._seconds)
        return True

    def put(self, key: bytes, content: bytes, now: float) -> bool:
        """Offer a block that is not there to one reader; False if there is no room for it."""
        assert key not in self._offers
        if self.num_bytes + len(content) > self._max_bytes:
            return False
        self._offers[key] = _Offer(content, 1, now + self._seconds)
        self.num_bytes += len(content)
        return True

    def read(self, key: bytes) -> bytes | None:
        """Return a block's content, or None; after the last reader it is gone."""
        offer = self._offers.get(key)
        if offer is None:
            return None
        if offer.readers > 1:
            self._offers[key] = offer._replace(readers=offer.readers - 1)  # its place stays
        else:
            self._forget(key)
        return offer.content

    def expire(self, now: float) -> int:
        """Forget what has waited for too long; return how many blocks."""
        late = []
        for key, offer in self._offers.items():
            if offer.until > now:
                break
            late.append(key)
        for key in late:
            self._forget(key)
        return len(late)

    def clear(self) -> None:
        """Forget all blocks."""
        self._offers.clear()
        self.num_bytes = 0

    def _forget(self, key: bytes) -> None:
        self.num_bytes -= len(self._offers.pop(key).content)
