"""Which block holds the keys and values of which token prefix, and what changes of that."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from engine.shared.block_names import short_name
from engine.shared.messages import ALL_BLOCKS

MAX_KNOWN_TOKENS = 2**20
"""Tokens of all sequences that are remembered: some 8 MB with the names of their blocks."""

_WORTHWHILE = 2
"""Blocks that have to be hashed for a sequence before it is remembered."""


class _Known(NamedTuple):
    tokens: bytes
    """Those of all blocks, as machine integers: compared at once."""
    digests: list[bytes]


class KnownDigests:
    """Remembers one sequence for each first block, the one remembered last.

    The beams of a search come anew with every token of theirs, choices share their prompt, and a
    conversation goes on where it was: only what is new of them has to be hashed.

    Args:
        block_size: tokens of a block.
        max_tokens: of all sequences; who has not been asked for longest is forgotten first.
    """

    def __init__(self, block_size: int, max_tokens: int = MAX_KNOWN_TOKENS) -> None:
        self._block_size = block_size
        self._max_blocks = max_tokens // block_size
        self.num_blocks = 0
        """How many blocks are remembered."""
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def beginning(self, first: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """Return a sequence's digests as far as they are known, the first of which is given."""
        known = self._known.get(first)
        if known is None:
            return [first]
        self._known.move_to_end(first)
        count = min(len(token_ids) // self._block_size, len(known.digests))
        tokens = _packed(token_ids[: count * self._block_size])
        return known.digests[: _common(tokens, known.tokens, count)]

    def remember(self, digests: Sequence[bytes], token_ids: Sequence[int], num_hashed: int) -> None:
        """Take the digests of a sequence, if enough of them had to be hashed for it."""
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
    """Return how many of the first `count` blocks are the same in both; the first is."""
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
    """Full blocks by the digest of all tokens up to their end."""

    def __init__(self) -> None:
        self.block_of: dict[bytes, int] = {}
        self.digest_of: dict[int, bytes] = {}

    def insert(self, digest: bytes, block_id: int) -> bool:
        """Name a block's content; False when another block has the same content already."""
        if digest in self.block_of:
            return False
        self.block_of[digest] = block_id
        self.digest_of[block_id] = digest
        return True

    def evict(self, block_id: int) -> bytes:
        """Forget a block whose content is about to be overwritten; return its name."""
        digest = self.digest_of.pop(block_id)
        del self.block_of[digest]
        return digest

    def clear(self) -> None:
        """Forget all blocks."""
        self.block_of.clear()
        self.digest_of.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block has the name that it is found by."""
        assert {block: digest for digest, block in self.block_of.items()} == self.digest_of


MAX_CHANGES = 1 << 14
"""Changes that are kept: more than a fast engine makes between two questions of a front end."""


class BlockChanges(NamedTuple):
    """What a front end has to know to be up to date; the same fields as those of `KvBlocks`."""

    after: int
    number: int
    stored: bytes
    removed: bytes


class BlockLog:
    """Keeps the newest changes of a set of names, which front ends follow.

    A front end asks for what is newer than a number. It gets the changes since, or all names where
    these are no longer kept: whoever is late costs the engine no more than one answer.

    Args:
        digests: the names as they are now, and later.
        max_changes: changes that are kept.
    """

    def __init__(self, digests: Collection[bytes], max_changes: int = MAX_CHANGES) -> None:
        self._digests = digests
        self._number = 0
        """Of the newest change."""
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=max_changes)

    def changed(self, digest: bytes, *, is_stored: bool) -> None:
        """A block can be found from now on, or cannot be any more."""
        self._number += 1
        self._changes.append((digest, is_stored))

    def cleared(self) -> None:
        """No block can be found any more."""
        self._number += 1
        self._changes.clear()

    def since(self, after: int) -> BlockChanges | None:
        """Return what is newer than number `after`; None if nothing is."""
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
