"""The KV cache as the scheduler sees it: one block table per sequence, with shared prefixes."""

import sys
from collections.abc import Iterable, Sequence

from engine.scheduler.block_pool import BlockPool
from engine.scheduler.known_digests import KnownDigests
from engine.scheduler.prefix_cache import ROOT_DIGEST, PrefixCache, block_digest

NEVER = sys.maxsize


class BlockTable:
    """The KV blocks of one sequence, in order of position; written by `KVCacheManager` only."""

    __slots__ = (
        "block_ids", "capacity", "digests", "generation", "next_commit", "num_committed", "root",
    )  # fmt: skip

    def __init__(self, root: bytes = ROOT_DIGEST) -> None:
        self.root = root
        """Parent of its first block: tables with different ones share nothing."""
        self.block_ids: list[int] = []
        self.capacity = 0
        """Positions that the blocks have room for."""
        self.digests: list[bytes] = []
        """Names of the sequence's first full blocks, as far as they were needed or known."""
        self.num_committed = 0
        """Leading blocks that were offered to the prefix cache."""
        self.next_commit = NEVER
        """Computed tokens from which on `commit` has something to do."""
        self.generation = 0


class KVCacheManager:
    """Gives blocks to sequences, takes them back and finds prefixes that are still there.

    Blocks become visible to other sequences only when `commit` says that they are computed.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self._cache = PrefixCache()
        self._known = KnownDigests(block_size)
        self._pool = BlockPool(num_blocks, on_evict=self._cache.evict)
        # Blocks that were (partly) written before a reset must never be found after it.
        self._generation = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence uses."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks in use by sequences, 0 to 1."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    def match(self, table: BlockTable, token_ids: Sequence[int]) -> list[int]:
        """Return the cached blocks that hold the longest known prefix, without taking them.

        At least one token is left to compute, because only computing it gives logits.
        """
        found: list[int] = []
        if not self.caching:
            return found
        num_hashed = 0
        for index in range((len(token_ids) - 1) // self.block_size):
            if index == len(table.digests):
                num_hashed += self._extend_digests(table, token_ids, index + 1)
            block_id = self._cache.get(table.digests[index])
            if block_id is None:
                break
            found.append(block_id)
        self._known.remember(table.digests, token_ids, num_hashed)
        return found

    def try_admit(
        self, table: BlockTable, token_ids: Sequence[int], *, use_cache: bool, headroom: int
    ) -> int | None:
        """Fill an empty table with room for all of `token_ids`.

        Args:
            table: the sequence's table.
            token_ids: all tokens known so far.
            use_cache: start from a cached prefix where there is one.
            headroom: blocks that must stay free.

        Returns:
            How many tokens' keys and values are already there, or None (and nothing changed) when
            there are not enough free blocks.
        """
        cached = self.match(table, token_ids) if use_cache else []
        num_new = -(-len(token_ids) // self.block_size) - len(cached)
        if num_new + self._pool.count_free(cached) + headroom > self._pool.num_free:
            return None
        # Cached blocks first: taking them keeps the allocation from evicting them.
        self._pool.acquire(cached)
        new = self._pool.allocate(num_new)
        assert new is not None
        table.block_ids = cached + new
        table.capacity = len(table.block_ids) * self.block_size
        table.generation = self._generation
        table.num_committed = len(cached)
        table.next_commit = (len(cached) + 1) * self.block_size if self.caching else NEVER
        return len(cached) * self.block_size

    def needs(
        self, table: BlockTable, token_ids: Sequence[int], *, use_cache: bool
    ) -> tuple[int, int]:
        """Return (cached tokens, free blocks) that `try_admit` would find and take right now."""
        cached = self.match(table, token_ids) if use_cache else []
        num_new = -(-len(token_ids) // self.block_size) - len(cached)
        return len(cached) * self.block_size, num_new + self._pool.count_free(cached)

    def try_grow(self, table: BlockTable, num_tokens: int, headroom: int = 0) -> list[int] | None:
        """Append blocks until the table has room for `num_tokens` positions.

        Args:
            table: the sequence's table.
            num_tokens: how long the sequence may get.
            headroom: blocks that must stay free.

        Returns:
            The new blocks, or None (and nothing changed) when there are not enough free ones.
        """
        num_new = max(0, -(-num_tokens // self.block_size) - len(table.block_ids))
        if num_new + headroom > self._pool.num_free:
            return None
        new = self._pool.allocate(num_new)
        if new is not None:
            table.block_ids += new
            table.capacity = len(table.block_ids) * self.block_size
        return new

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Offer the blocks that the first `num_computed` tokens fill to other sequences."""
        if table.generation != self._generation:
            table.next_commit = NEVER
            return
        num_full = num_computed // self.block_size
        num_hashed = self._extend_digests(table, token_ids, num_full)
        self._known.remember(table.digests, token_ids, num_hashed)
        for index in range(table.num_committed, num_full):
            if self._cache.insert(table.digests[index], table.block_ids[index]):
                self._pool.keep(table.block_ids[index])
        table.num_committed = num_full
        table.next_commit = (num_full + 1) * self.block_size

    def free(self, table: BlockTable) -> None:
        """Take all blocks of a table back; the end of a prefix will be evicted before its start."""
        self._pool.release(table.block_ids[::-1])
        table.block_ids = []
        table.capacity = 0
        table.num_committed = 0
        table.next_commit = NEVER

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, also what running sequences computed so far.

        Returns:
            How many blocks were forgotten.
        """
        num_forgotten = len(self._cache)
        self._cache.clear()
        self._pool.forget_contents()
        self._generation += 1
        return num_forgotten

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Check all books against the tables of all sequences.

        Raises:
            AssertionError: a block is leaked, shared wrongly or named wrongly.
        """
        self._pool.check_integrity([table.block_ids for table in tables])
        self._cache.check_integrity(self._pool.kept_blocks())

    def _extend_digests(self, table: BlockTable, token_ids: Sequence[int], num_blocks: int) -> int:
        """Name a sequence's first blocks; return how many of them had to be hashed."""
        size, digests = self.block_size, table.digests
        num_hashed = 0
        while len(digests) < num_blocks:
            start = len(digests) * size
            parent = digests[-1] if digests else table.root
            digest = block_digest(parent, token_ids[start : start + size])
            num_hashed += 1
            digests += [digest] if digests else self._known.beginning(digest, token_ids)
        return num_hashed
