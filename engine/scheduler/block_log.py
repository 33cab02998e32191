"""Which KV blocks can be found, as numbered changes that front ends follow: without I/O.

A front end asks for what is newer than a number. It gets the changes since, or all names where
these are no longer kept: whoever is late costs the engine no more than one answer.
"""

from collections import deque
from collections.abc import Collection
from itertools import islice
from typing import NamedTuple

from engine.shared.block_names import short_name
from engine.shared.messages import ALL_BLOCKS

MAX_CHANGES = 1 << 14
"""Changes that are kept: more than a fast engine makes between two questions of a front end."""


class BlockChanges(NamedTuple):
    """What a front end has to know to be up to date; the same fields as those of `KvBlocks`."""

    after: int
    number: int
    stored: bytes
    removed: bytes


class BlockLog:
    """Keeps the newest changes of a set of names.

    Args:
        digests: the names as they are now, and later.
        max_changes: changes that are kept.
    """

    def __init__(self, digests: Collection[bytes], max_changes: int = MAX_CHANGES) -> None:
        self._digests = digests
        self._number = 0
        """Of the newest change."""
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=max_changes)

    def stored(self, digest: bytes) -> None:
        """A block can be found from now on."""
        self._note(digest, is_stored=True)

    def removed(self, digest: bytes) -> None:
        """A block cannot be found any more."""
        self._note(digest, is_stored=False)

    def _note(self, digest: bytes, *, is_stored: bool) -> None:
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
