"""Index of cached KV blocks by token prefix, and a log of its changes for front ends."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from engine.shared.block_names import short_name
from engine.shared.messages import ALL_BLOCKS

MAX_KNOWN_TOKENS = 2**20
"""Maximum tokens of remembered sequences: about 8 MB including block digests."""

_WORTHWHILE = 2
"""Minimum hashed blocks for a sequence to be remembered."""


class _Known(NamedTuple):
    tokens: bytes
    """Tokens of all blocks as packed machine integers, for fast comparison."""
    digests: list[bytes]


class KnownDigests:
    """Remembers block digests: the newest sequence for each first block.

    Beam searches resubmit sequences with every token, choices share their prompt, and conversations
    continue: only the new blocks need to be hashed.

    Args:
        block_size: tokens per block.
        max_tokens: maximum tokens of all sequences; eviction is LRU.
    """

    def __init__(self, block_size: int, max_tokens: int = MAX_KNOWN_TOKENS) -> None:
        self._block_size = block_size
        self._max_blocks = max_tokens // block_size
        self.num_blocks = 0
        """Number of remembered blocks."""
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def beginning(self, first: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """Return the known digests of a sequence that starts with the digest `first`."""
        known = self._known.get(first)
        if known is None:
            return [first]
        self._known.move_to_end(first)
        count = min(len(token_ids) // self._block_size, len(known.digests))
        tokens = _packed(token_ids[: count * self._block_size])
        return known.digests[: _common(tokens, known.tokens, count)]

    def remember(self, digests: Sequence[bytes], token_ids: Sequence[int], num_hashed: int) -> None:
        """Remember a sequence's digests, if enough of them had to be hashed."""
        count = len(digests)
        if num_hashed < _WORTHWHILE or count > self._max_blocks:
            return
        known = self._known.pop(digests[0], None)
        if known is not None:
            self.num_blocks -= len(known.digests)
        tokens = _packed(token_ids[: count * self._block_size])
        self._known[digests[0]] = _Known(tokens, list(digests))
        self.num_blocks += count
        while self.num_blocks > self._max_blocks:
            _, forgotten = self._known.popitem(last=False)
            self.num_blocks -= len(forgotten.digests)


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _common(tokens: bytes, others: bytes, count: int) -> int:
    """Return how many of the first `count` blocks are equal; the first is assumed to be."""
    size = len(tokens) // count
    low, high = 1, count
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[low * size : middle * size] == others[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixCache:
    """Full blocks, by the digest of all tokens up to their end."""

    def __init__(self) -> None:
        self.block_of: dict[bytes, int] = {}
        self.digest_of: dict[int, bytes] = {}

    def insert(self, digest: bytes, block_id: int) -> bool:
        """Register a block's content; return False if another block already has the same."""
        if digest in self.block_of:
            return False
        self.block_of[digest] = block_id
        self.digest_of[block_id] = digest
        return True

    def evict(self, block_id: int) -> bytes:
        """Remove a block that is about to be overwritten; return its digest."""
        digest = self.digest_of.pop(block_id)
        del self.block_of[digest]
        return digest

    def clear(self) -> None:
        """Remove all blocks."""
        self.block_of.clear()
        self.digest_of.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if the two indexes are inconsistent."""
        assert {block: digest for digest, block in self.block_of.items()} == self.digest_of


MAX_CHANGES = 1 << 14
"""Changes kept: more than a fast engine makes between two requests of a front end."""


class BlockChanges(NamedTuple):
    """Changes that bring a front end up to date; the same fields as `KvBlocks`."""

    after: int
    number: int
    stored: bytes
    removed: bytes


class BlockLog:
    """Log of the newest changes to a set of digests, which front ends follow.

    A front end requests changes after a number. It gets those, or all digests if some of the
    changes are no longer kept, so a slow front end costs the engine a single answer.

    Args:
        digests: live view of the current digests.
        max_changes: maximum changes kept.
    """

    def __init__(self, digests: Collection[bytes], max_changes: int = MAX_CHANGES) -> None:
        self._digests = digests
        self._number = 0
        """Number of the newest change."""
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=max_changes)

    def changed(self, digest: bytes, *, is_stored: bool) -> None:
        """Log that a block was cached or evicted."""
        self._number += 1
        self._changes.append((digest, is_stored))

    def cleared(self) -> None:
        """Log that all blocks were dropped."""
        self._number += 1
        self._changes.clear()

    def since(self, after: int) -> BlockChanges | None:
        """Return the changes after number `after`; None if there are none."""
        count = self._number - after
        if after == ALL_BLOCKS or not 0 <= count <= len(self._changes):
            names = b"".join(map(short_name, self._digests))
            return BlockChanges(ALL_BLOCKS, self._number, names, b"")
        if not count:
            return None
        newest: dict[bytes, bool] = {}
        for digest, is_stored in islice(reversed(self._changes), count):
            newest.setdefault(digest, is_stored)
        stored = [short_name(digest) for digest, is_stored in newest.items() if is_stored]
        removed = [short_name(digest) for digest, is_stored in newest.items() if not is_stored]
        return BlockChanges(after, self._number, b"".join(stored), b"".join(removed))
