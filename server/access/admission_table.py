"""What the front ends of one node have taken on, in shared memory.

One row per front end, written by its owner. A reservation is published before the sum over all
rows is read, so two front ends never both take the last place; the lock around the two steps
also keeps them from both giving it up. The lock is not waited for without end: a front end that was
stopped while it held it must not stop its neighbours.

Each owner holds a file lock on its row for as long as its process lives. A row whose lock is free
has no owner, and its contents do not count.
"""

import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

PLACES = 4096
"""Places for counting tenants; those that fall on the same one are counted as one."""

_HEAD_WORDS = 8  # one cache line
_TENANT_WORDS = 2
_ROW_WORDS = _HEAD_WORDS + PLACES * _TENANT_WORDS
_WORD = 8
_REQUESTS, _TOKENS, _ENDED, _BODY_BYTES, _CONNECTIONS = range(5)

_LOCK_ATTEMPTS = 200
"""How often a taken lock is tried, giving way each time, before going on without it."""


class Totals(NamedTuple):
    """Sums over all living front ends of a node."""

    requests: int
    """Sequences that were taken on and have not ended."""
    tokens: int
    """Prompt tokens of them that wait to be computed."""


_NOBODY = memoryview(bytes(PLACES * _TENANT_WORDS * _WORD)).cast("q")
NOTHING = Totals(0, 0)
_SMALL = Totals(16, 4096)
"""Largest addition that is tried without the lock."""

_MAX = 2**31
"""No addition is larger: words of 64 bits hold more of them than can ever be made."""

Room = Callable[[Totals, Totals], bool]
"""Whether the sums over all tenants, and over the one, fit; a newcomer is included."""

_NAME = "name"
"""File with the name of a table, which no other table of the cluster has."""


def create_admission_table(directory: Path, num_front_ends: int) -> None:
    """Make an empty table for front ends 0 to `num_front_ends` - 1 in a new directory."""
    directory.mkdir(exist_ok=True)
    (directory / _NAME).write_text(secrets.token_hex(8))
    for index in range(num_front_ends):
        _row_lock(directory, index).touch()
    with (directory / "rows").open("wb") as file:
        os.truncate(file.fileno(), num_front_ends * _ROW_WORDS * _WORD)


def _row_lock(directory: Path, index: int) -> Path:
    return directory / f"row-{index}"


class AdmissionTable:
    """One front end's view of the table in `directory`; None makes a private table."""

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

    # -- the own row -----------------------------------------------------------------------------

    def try_add(self, requests: int, tokens: int, room: Room, place: int = 0) -> bool:
        """Add to the own row if `room` says that the totals, these included, fit.

        Far from the limit this takes no lock: what a neighbour is adding at this moment may not
        be visible yet, but it fits into the margin. Whatever `room` raises, nothing was added.

        Raises:
            ValueError: an amount is negative.
        """
        if requests < 0 or tokens < 0:
            raise ValueError(f"cannot reserve {requests} sequences and {tokens} tokens")
        if requests > _MAX or tokens > _MAX:
            return False
        small = requests <= _SMALL.requests and tokens <= _SMALL.tokens
        if small and self._add_if(requests, tokens, room, place, self._margin):
            return True
        with self._locked():
            return self._add_if(requests, tokens, room, place, NOTHING)

    def _add_if(self, requests: int, tokens: int, room: Room, place: int, margin: Totals) -> bool:
        self.add(requests, tokens, place)
        fits = False
        try:
            fits = room(self.totals(margin), self.of_tenant(place, margin))
            return fits
        finally:
            if not fits:
                self.add(-requests, -tokens, place)

    def add(self, requests: int, tokens: int, place: int = 0) -> None:
        """Add to the own row whatever the totals are."""
        words, own = self._words, self._own
        words[own + _REQUESTS] += requests
        words[own + _TOKENS] += tokens
        cell = own + _HEAD_WORDS + place * _TENANT_WORDS
        words[cell + _REQUESTS] += requests
        words[cell + _TOKENS] += tokens

    def end(self, requests: int, tokens: int, place: int = 0) -> None:
        """Take sequences that have ended, and what they still queued, from the own row."""
        self.add(-requests, -tokens, place)
        self._words[self._own + _ENDED] += requests

    def add_body_bytes(self, size: int) -> None:
        """Add to the bytes of request bodies that are being received."""
        self._words[self._own + _BODY_BYTES] += size

    def set_connections(self, count: int | None) -> None:
        """Say how many connections there are here; None: new ones are not wanted."""
        self._words[self._own + _CONNECTIONS] = 0 if count is None else 1 + count

    # -- all rows --------------------------------------------------------------------------------

    @property
    def has_neighbours(self) -> bool:
        """Whether there are places of other front ends on this node."""
        return len(self._starts) > 1

    def totals(self, more: Totals = NOTHING) -> Totals:
        """Return the sums over all rows, those of dead front ends included, and `more`."""
        words, (requests, tokens) = self._words, more
        for start in self._starts:
            requests += words[start]
            tokens += words[start + _TOKENS]
        return Totals(requests, tokens)

    def of_tenant(self, place: int, more: Totals = NOTHING) -> Totals:
        """Return the sums of one tenant over all rows, and `more`."""
        words, (requests, tokens) = self._words, more
        offset = _HEAD_WORDS + place * _TENANT_WORDS
        for start in self._starts:
            requests += words[start + offset]
            tokens += words[start + offset + _TOKENS]
        return Totals(requests, tokens)

    def own(self, place: int) -> Totals:
        """Return the sums of one tenant in the own row."""
        cell = self._own + _HEAD_WORDS + place * _TENANT_WORDS
        return Totals(self._words[cell + _REQUESTS], self._words[cell + _TOKENS])

    def body_bytes(self) -> int:
        """Return the bytes of request bodies that are being received on this node."""
        words = self._words
        return sum(words[start + _BODY_BYTES] for start in self._starts)

    def fewest_connections(self) -> int | None:
        """Return the fewest connections of a neighbour that wants new ones; None if none does."""
        found = [self._words[start + _CONNECTIONS] for start in self._starts if start != self._own]
        return min((count - 1 for count in found if count), default=None)

    def ended(self) -> int:
        """Return how many sequences have ended on this node; only grows."""
        words, ended = self._words, 0
        for start in self._starts:
            ended += words[start + _ENDED]
        return ended

    def drop_dead(self) -> bool:
        """Clear the rows of front ends that have died; return whether anything was cleared."""
        if self._directory is None:
            return False
        dropped = False
        for index, start in enumerate(self._starts):
            held = (_REQUESTS, _TOKENS, _BODY_BYTES, _CONNECTIONS)
            if start == self._own or not any(self._words[start + word] for word in held):
                continue
            file = self._row_file(index)
            try:
                # Shared, so that two that look at the same time do not take each other for it.
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
