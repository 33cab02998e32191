"""Allocation of KV blocks: reference counts, and the order of eviction."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Owner of all KV blocks of an engine: reference counts and eviction order.

    A block is *referenced* by one or more sequences, or free. Free blocks with reusable content
    (`mark_cached`) are allocated last, least recently released first; `on_evict(block_id)` is
    called just before such a block is overwritten. Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], object]) -> None:
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self._references = [0] * num_blocks
        self._is_cached = bytearray(num_blocks)
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Unreferenced blocks, including cached ones."""
        return len(self._blank) + len(self._reusable)

    def count_free(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks are unreferenced."""
        references = self._references
        return sum(references[block_id] == 0 for block_id in block_ids)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None if fewer are free."""
        if count > self.num_free:
            return None
        allocated = []
        for _ in range(count):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = self._reusable.popitem(last=False)
                self._is_cached[block_id] = 0
                self.on_evict(block_id)
            self._references[block_id] = 1
            allocated.append(block_id)
        return allocated

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to cached blocks."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._reusable[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each; cached blocks are evicted in the order given."""
        for block_id in block_ids:
            self._references[block_id] -= 1
            if self._references[block_id] > 0:
                continue
            if self._is_cached[block_id]:
                self._reusable[block_id] = None
            else:
                self._blank.append(block_id)

    def mark_cached(self, block_id: int) -> None:
        """Mark the content of a referenced block as reusable after its release."""
        self._is_cached[block_id] = 1

    def forget_contents(self) -> None:
        """Uncache all blocks; references stay and `on_evict` is not called."""
        self._is_cached = bytearray(self.num_blocks)
        self._blank.extend(self._reusable)
        self._reusable.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError if a block is leaked, free while in use, or free twice."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block_id in table:
                expected[block_id] += 1
        assert self._references == expected, "reference counts differ from the block tables"
        free = sorted([*self._blank, *self._reusable])
        unused = [block_id for block_id, count in enumerate(expected) if count == 0]
        assert free == unused, "free blocks differ from the unreferenced blocks"
        assert all(self._is_cached[block_id] for block_id in self._reusable)
        assert not any(self._is_cached[block_id] for block_id in self._blank)

    def cached_blocks(self) -> set[int]:
        """Return the ids of all cached blocks, referenced or not."""
        return {block_id for block_id, is_cached in enumerate(self._is_cached) if is_cached}
