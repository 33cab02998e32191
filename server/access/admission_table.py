"""Shared-memory counters of the requests that the front ends of a node have accepted.

There is one row per front end, written only by its owner. A reservation is published before all
rows are summed, so two front ends never both take the last slot; a lock around the two steps also
keeps them from both giving it up. Waiting for the lock is bounded: a front end that was suspended
while holding it must not block its neighbours.

Each owner holds a file lock on its row while its process lives. A row whose file lock is free has
no owner, and its contents are ignored.
"""

import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

TENANT_SLOTS = 4096
"""Number of tenant slots; tenants that share a slot are counted as one."""

_HEAD_WORDS = 8  # one cache line
_TENANT_WORDS = 2
_ROW_WORDS = _HEAD_WORDS + TENANT_SLOTS * _TENANT_WORDS
_WORD = 8
_REQUESTS, _TOKENS, _ENDED, _BODY_BYTES, _CONNECTIONS = range(5)

_LOCK_ATTEMPTS = 200
"""Attempts to take the lock, yielding the CPU in between, before proceeding without it."""


class Totals(NamedTuple):
    """Sums over all living front ends of a node."""

    requests: int
    """Accepted sequences that have not ended."""
    tokens: int
    """Their prompt tokens that have not been computed."""


_NOBODY = memoryview(bytes(TENANT_SLOTS * _TENANT_WORDS * _WORD)).cast("q")
NOTHING = Totals(0, 0)
_SMALL = Totals(16, 4096)
"""Largest addition attempted without the lock."""

_MAX = 2**31
"""Maximum addition: 64-bit counters cannot overflow with it."""

Room = Callable[[Totals, Totals], bool]
"""Whether the sums over all tenants, and over one, fit; both include the new request."""

_NAME = "name"
"""File with a name of the table that is unique in the cluster."""


def create_admission_table(directory: Path, num_front_ends: int) -> None:
    """Create an empty table for front ends 0 to `num_front_ends` - 1 in a new directory."""
    directory.mkdir(exist_ok=True)
    (directory / _NAME).write_text(secrets.token_hex(8))
    for index in range(num_front_ends):
        _row_lock(directory, index).touch()
    with (directory / "rows").open("wb") as file:
        os.truncate(file.fileno(), num_front_ends * _ROW_WORDS * _WORD)


def _row_lock(directory: Path, index: int) -> Path:
    return directory / f"row-{index}"


class AdmissionTable:
    """One front end's view of the table in `directory`; None creates a private table."""

    def __init__(self, directory: Path | None, front_end: int = 0) -> None:
        self._files: dict[int, int] = {}
        self._directory = directory
        self.name = secrets.token_hex(8) if directory is None else (directory / _NAME).read_text()
        if directory is None:
            self._lock_file = -1
            self._map = mmap.mmap(-1, _ROW_WORDS * _WORD)
        else:
            self._lock_file = os.open(directory / "rows", os.O_RDWR)
            self._map = mmap.mmap(self._lock_file, 0)
        self._words = memoryview(self._map).cast("q")
        self._own = front_end * _ROW_WORDS
        self._starts = range(0, len(self._words), _ROW_WORDS)
        neighbours = len(self._starts) - 1
        self._margin = Totals(neighbours * _SMALL.requests, neighbours * _SMALL.tokens)
        if directory is not None:
            fcntl.flock(self._row_file(front_end), fcntl.LOCK_EX)
            with self._locked():
                self._clear(self._own)

    def _row_file(self, index: int) -> int:
        file = self._files.get(index)
        if file is None:
            assert self._directory is not None
            file = os.open(_row_lock(self._directory, index), os.O_RDWR)
            self._files[index] = file
        return file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        held = False
        for _ in range(_LOCK_ATTEMPTS if self._lock_file >= 0 else 0):
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
                break
            except BlockingIOError:
                os.sched_yield()
        try:
            yield
        finally:
            if held:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    # -- own row ---------------------------------------------------------------------------------

    def try_add(self, requests: int, tokens: int, room: Room, slot: int = 0) -> bool:
        """Add to the own row if `room` accepts the totals including the addition.

        Far from the limit this takes no lock: a neighbour's concurrent addition may not be visible
        yet, but it fits into the margin. If `room` raises, nothing is added.

        Raises:
            ValueError: an amount is negative.
        """
        if requests < 0 or tokens < 0:
            raise ValueError(f"cannot reserve {requests} sequences and {tokens} tokens")
        if requests > _MAX or tokens > _MAX:
            return False
        small = requests <= _SMALL.requests and tokens <= _SMALL.tokens
        if small and self._add_if(requests, tokens, room, slot, self._margin):
            return True
        with self._locked():
            return self._add_if(requests, tokens, room, slot, NOTHING)

    def _add_if(self, requests: int, tokens: int, room: Room, slot: int, margin: Totals) -> bool:
        self.add(requests, tokens, slot)
        fits = False
        try:
            fits = room(self.totals(margin), self.of_tenant(slot, margin))
            return fits
        finally:
            if not fits:
                self.add(-requests, -tokens, slot)

    def add(self, requests: int, tokens: int, slot: int = 0) -> None:
        """Add to the own row unconditionally."""
        words, own = self._words, self._own
        words[own + _REQUESTS] += requests
        words[own + _TOKENS] += tokens
        cell = own + _HEAD_WORDS + slot * _TENANT_WORDS
        words[cell + _REQUESTS] += requests
        words[cell + _TOKENS] += tokens

    def end(self, requests: int, tokens: int, slot: int = 0) -> None:
        """Subtract ended sequences and their remaining queued tokens from the own row."""
        self.add(-requests, -tokens, slot)
        self._words[self._own + _ENDED] += requests

    def add_body_bytes(self, size: int) -> None:
        """Add to the count of request body bytes being received."""
        self._words[self._own + _BODY_BYTES] += size

    def set_connections(self, count: int | None) -> None:
        """Publish the number of connections here; None: accepts no new ones."""
        self._words[self._own + _CONNECTIONS] = 0 if count is None else 1 + count

    # -- all rows --------------------------------------------------------------------------------

    @property
    def has_neighbours(self) -> bool:
        """Whether the table has rows for other front ends."""
        return len(self._starts) > 1

    def totals(self, more: Totals = NOTHING) -> Totals:
        """Return the sums over all rows, including those of dead front ends, plus `more`."""
        words, (requests, tokens) = self._words, more
        for start in self._starts:
            requests += words[start]
            tokens += words[start + _TOKENS]
        return Totals(requests, tokens)

    def of_tenant(self, slot: int, more: Totals = NOTHING) -> Totals:
        """Return the sums of one tenant over all rows, plus `more`."""
        words, (requests, tokens) = self._words, more
        offset = _HEAD_WORDS + slot * _TENANT_WORDS
        for start in self._starts:
            requests += words[start + offset]
            tokens += words[start + offset + _TOKENS]
        return Totals(requests, tokens)

    def own(self, slot: int) -> Totals:
        """Return the sums of one tenant in the own row."""
        cell = self._own + _HEAD_WORDS + slot * _TENANT_WORDS
        return Totals(self._words[cell + _REQUESTS], self._words[cell + _TOKENS])

    def body_bytes(self) -> int:
        """Return the request body bytes being received on this node."""
        words = self._words
        return sum(words[start + _BODY_BYTES] for start in self._starts)

    def fewest_connections(self) -> int | None:
        """Return the fewest connections of a neighbour that accepts new ones; None if none does."""
        found = [self._words[start + _CONNECTIONS] for start in self._starts if start != self._own]
        return min((count - 1 for count in found if count), default=None)

    def ended(self) -> int:
        """Return the number of sequences that have ended on this node; monotonic."""
        words, ended = self._words, 0
        for start in self._starts:
            ended += words[start + _ENDED]
        return ended

    def drop_dead(self) -> bool:
        """Clear the rows of dead front ends; return whether any was cleared."""
        if self._directory is None:
            return False
        dropped = False
        for index, start in enumerate(self._starts):
            held = (_REQUESTS, _TOKENS, _BODY_BYTES, _CONNECTIONS)
            if start == self._own or not any(self._words[start + word] for word in held):
                continue
            file = self._row_file(index)
            try:
                # A shared lock, so that concurrent checkers do not take each other for the owner.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            try:
                with self._locked():
                    self._clear(start)
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)
            dropped = True
        return dropped

    def _clear(self, start: int) -> None:
        self._words[start + _REQUESTS] = 0
        self._words[start + _TOKENS] = 0
        self._words[start + _HEAD_WORDS : start + _ROW_WORDS] = _NOBODY
        self._words[start + _BODY_BYTES] = 0
        self._words[start + _CONNECTIONS] = 0

    def close(self) -> None:
        """Release the mapping and the row."""
        self._words.release()
        self._map.close()
        for file in (*self._files.values(), self._lock_file):
            if file >= 0:
                os.close(file)
        self._files.clear()
        self._lock_file = -1
