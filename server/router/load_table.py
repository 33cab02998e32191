"""Shared-memory table of the requests that the front ends of a node have sent to each engine.

One cell, a cache line, per front end and engine; a front end writes only its own row and reads all
others. Combined with the counts that an engine reports as received, every front end knows the
requests in transit to an engine, including its peers', at the moment it chooses.

Each count is one aligned 8-byte store, so readers need no lock: they see either the old or the new
value of each count.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from engine.shared.messages import EngineStats, Received

MAX_ENGINES = 1024
_CELL_WORDS = 8  # one cache line
_WORD = 8
_CELL = _CELL_WORDS * _WORD


class Sent(NamedTuple):
    """Totals sent by one front-end process to one engine process."""

    front_end_incarnation: int
    engine_incarnation: int
    requests: int
    prompt_tokens: int


_CELL_FORMAT = struct.Struct(f"={len(Sent._fields)}Q")
_EMPTY = bytes(_CELL_FORMAT.size)


def create_load_table(path: Path, num_front_ends: int) -> None:
    """Create an empty table for front ends 0 to `num_front_ends` - 1 (sparse on disk)."""
    with path.open("wb") as file:
        os.truncate(file.fileno(), num_front_ends * MAX_ENGINES * _CELL)


class LoadTable:
    """One front end's view of the table at `path`."""

    def __init__(self, path: Path, front_end: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("Q")
        self._front_end = front_end
        self.num_front_ends = len(self._words) // (MAX_ENGINES * _CELL_WORDS)
        self._peers = [i for i in range(self.num_front_ends) if i != front_end]
        self._rows = [peer * MAX_ENGINES * _CELL for peer in self._peers]

    def publish(self, rank: int, sent: Sent) -> None:
        """Write this front end's cell for an engine."""
        if rank < MAX_ENGINES and self._front_end < self.num_front_ends:
            at = (self._front_end * MAX_ENGINES + rank) * _CELL_WORDS
            for offset, value in enumerate(sent):
                self._words[at + offset] = value

    def cells(self, rank: int) -> list[bytes]:
        """Return all other front ends' raw cells for an engine, for comparison and `peers`."""
        if rank >= MAX_ENGINES:
            return []
        memory, at = self._map, rank * _CELL
        end = at + _CELL_FORMAT.size
        return [memory[row + at : row + end] for row in self._rows]

    def peers(self, cells: list[bytes]) -> list[tuple[int, Sent]]:
        """Return the totals of each other front end with a non-empty cell."""
        return [
            (peer, Sent(*_CELL_FORMAT.unpack(cell)))
            for peer, cell in zip(self._peers, cells, strict=False)
            if cell != _EMPTY
        ]

    def close(self) -> None:
        """Release the mapping."""
        self._words.release()
        self._map.close()


def received_from(stats: EngineStats | None, position: int, incarnation: int) -> Received | None:
    """Return what an engine has received from a front-end process; None if nothing.

    Incarnations identify processes; `position` is the most likely index in the engine's list.
    """
    if stats is None:
        return None
    entries = stats.received
    # This runs for every engine and request.
    if position < len(entries) and entries[position].front_end_incarnation == incarnation:
        return entries[position]
    for entry in entries:
        if entry.front_end_incarnation == incarnation:
            return entry
    return None
