"""Numbered batches of events, the newest ones again, and all blocks at once: without I/O."""

from collections import deque
from collections.abc import Sequence

import msgspec

from engine.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

SNAPSHOT = 2**64 - 1
"""The number that asks for all blocks instead of the batches that are kept."""


class Journal:
    """Batches of one engine process.

    The first one says that nothing is there: whoever sees the numbers begin anew has to do with a
    new process.
    """

    def __init__(self, rank: int, max_batches: int) -> None:
        self._rank = rank
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=max_batches)
        self._blocks: dict[tuple[int | None, bytes], BlockStored] = {}
        """All blocks that can be found, each by itself, in the order of their being stored."""
        self._next = 0
        self._encoder = msgspec.msgpack.Encoder()

    def add(self, events: Sequence[Event], timestamp: float) -> tuple[int, bytes]:
        """Return the number of a new batch, and its content."""
        for event in events:
            self._note(event)
        batch = self._next, self._encode(events, timestamp)
        self._next += 1
        self._batches.append(batch)
        return batch

    def replay(self, start: int, timestamp: float) -> list[tuple[int, bytes]]:
        """Return the batches from a number on.

        Where one of them is no longer kept, and for `SNAPSHOT`, it is one batch instead, with the
        newest number: that all is cleared, and all blocks that there are.
        """
        is_kept = not self._next or (self._batches and self._batches[0][0] <= start)
        if is_kept and start != SNAPSHOT:
            return [batch for batch in self._batches if batch[0] >= start]
        if not self._next:
            return []
        events: list[Event] = [AllBlocksCleared(), *self._blocks.values()]
        return [(self._next - 1, self._encode(events, timestamp))]

    def _encode(self, events: Sequence[Event], timestamp: float) -> bytes:
        return self._encoder.encode((timestamp, events, self._rank))

    def _note(self, event: Event) -> None:
        match event:
            case AllBlocksCleared():
                self._blocks.clear()
            case BlockRemoved():
                for digest in event.block_hashes:
                    self._blocks.pop((event.group_idx, digest), None)
            case BlockStored():
                parent, size = event.parent_block_hash, event.block_size
                for index, digest in enumerate(event.block_hashes):
                    self._blocks[event.group_idx, digest] = msgspec.structs.replace(
                        event,
                        block_hashes=[digest],
                        parent_block_hash=parent,
                        token_ids=event.token_ids[index * size : (index + 1) * size],
                        extra_keys=event.extra_keys and event.extra_keys[index : index + 1],
                    )
                    parent = digest
