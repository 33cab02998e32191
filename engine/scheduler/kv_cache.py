"""The scheduler's view of the KV cache: block tables of sequences, with shared prefixes."""

from collections.abc import Callable, Iterable, Sequence

from engine.kv.events import KvEventLog
from engine.kv.tiers import BlockName, Fetch, KvTiers
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.block_table import FREED, NEVER, BlockTable, CacheShape, GroupTable
from engine.scheduler.prefix_cache import BlockChanges, BlockLog, KnownDigests, PrefixCache
from engine.shared.block_names import block_digest, shown_in
from engine.shared.messages import KvSource


class KVCacheManager:
    """Allocates blocks to sequences, frees them, and finds cached prefixes.

    Blocks become visible to other sequences only once `commit` reports them as computed. All layer
    groups share one pool of equally sized blocks.

    Methods take a sequence's table and all its known tokens; `headroom` is the number of blocks
    that must stay free.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        shape: CacheShape | None = None,
        tiers: KvTiers | None = None,
        events: KvEventLog | None = None,
    ) -> None:
        """Manage `num_blocks` blocks; the default shape is one group that keeps all positions.

        `tiers` stores prefixes that should outlive their blocks; `events` is notified of blocks
        that become cached or are evicted.
        """
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self._shape = shape or CacheShape(block_size)
        self.num_groups = len(self._shape.windows)
        """Number of layer groups, each with its own blocks."""
        self._caches = [PrefixCache() for _ in self._shape.windows]
        self.slides = bool(self._shape.sliding)
        """Whether sequences free blocks before they end."""
        self._sliding = self._shape.sliding
        self._full_groups = [n for n in range(len(self._caches)) if n not in self._sliding]
        self._known = KnownDigests(block_size)
        self._tiers = tiers
        self._events = events
        self._log: BlockLog | None = None
        """For front ends; created on first request."""
        self._reported_group = self._full_groups[0] if self._full_groups else 0
        """The group whose blocks are reported: one that keeps all positions, if any."""
        stores_evicted = tiers is not None and tiers.stores_evicted
        is_plain = self.num_groups == 1 and not stores_evicted and events is None
        self.pool = BlockPool(
            num_blocks, on_evict=self._caches[0].evict if is_plain else self._evict
        )
        # Blocks that were written, even partly, before a reset must never be found after it.
        self._generation = 0

    @property
    def usage(self) -> float:
        """Share of the blocks in use by sequences, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def match(self, table: BlockTable, token_ids: Sequence[int]) -> list[list[int]]:
        """Return the cached blocks of the longest known prefix, by group, without acquiring them.

        Blocks behind the window of a group's next token are `FREED`. At least one token is left to
        compute, since only that produces logits.
        """
        if not self.caching:
            return [[] for _ in self._caches]
        limit = (len(token_ids) - 1) // self.block_size
        num_hashed = 0 if self._full_groups else self._extend_digests(table, token_ids, limit)
        matched: list[list[int]] = [[] for _ in self._caches]
        for group in self._full_groups:
            block_of, found = self._caches[group].block_of, matched[group]
            for index in range(limit):
                if index == len(table.digests):
                    num_hashed += self._extend_digests(table, token_ids, index + 1)
                block_id = block_of.get(table.digests[index])
                if block_id is None:
                    break
                found.append(block_id)
            limit = len(found)
        self._remember(table, token_ids, num_hashed)
        return self._match_windows(table, limit, matched) if self._sliding else matched

    def try_admit(
        self, table: BlockTable, token_ids: Sequence[int], *, use_cache: bool, headroom: int
    ) -> int | None:
        """Fill an empty table with blocks for `token_ids`, up to each group's limit.

        With `use_cache` it starts with the longest cached prefix.

        Returns:
            Number of tokens whose keys and values are cached, or None (with nothing changed) if
            there are not enough free blocks.
        """
        matched = self.match(table, token_ids) if use_cache else [[] for _ in self._caches]
        cached = self._cached(matched)
        num_new = self._num_new_blocks(matched, len(token_ids))
        if sum(num_new) + self.pool.count_free(cached) + headroom > self.pool.num_free:
            return None
        # Acquire cached blocks first, so that the allocation does not evict them.
        self.pool.acquire(cached)
        table.clear()
        for ids, count in zip(matched, num_new, strict=True):
            new = self.pool.allocate(count)
            assert new is not None
            group = GroupTable()
            group.first = group.num_sent = ids.count(FREED)
            group.ids = ids + new
            table.groups.append(group)
        num_cached = len(matched[0])
        table.num_admitted = -(-len(token_ids) // self.block_size)
        table.generation = self._generation
        table.num_committed = num_cached
        table.next_commit = (num_cached + 1) * self.block_size if self.caching else NEVER
        self._measure(table)
        if table.offered:
            self._offer(table, 0, num_cached)
        return num_cached * self.block_size

    def needs(
        self, table: BlockTable, token_ids: Sequence[int], *, use_cache: bool
    ) -> tuple[int, int]:
        """Return (cached tokens, free blocks) that `try_admit` would find and take now."""
        matched = self.match(table, token_ids) if use_cache else [[] for _ in self._caches]
        cached = self._cached(matched)
        num_new = sum(self._num_new_blocks(matched, len(token_ids)))
        return len(matched[0]) * self.block_size, num_new + self.pool.count_free(cached)

    def fetch(
        self, table: BlockTable, token_ids: Sequence[int], source: KvSource | None = None
    ) -> Fetch | None:
        """Start reading those blocks of a prompt's prefix that the KV cache lacks.

        `source` is an engine that offers them, in addition to the tiers. Returns None
        if there is nothing to wait for.
        """
        limit = (len(token_ids) - 1) // self.block_size
        if self._tiers is None or limit < 1 or not self._tiers.can_fetch(source):
            return None
        self._extend_digests(table, token_ids, limit)
        digests = table.digests[:limit]
        missing = [{d for d in digests if d not in cache.block_of} for cache in self._caches]
        if not any(missing):
            return None

        def read_missing(read: Callable[[BlockName], bool]) -> None:
            end = limit
            for group in self._full_groups:
                for index, digest in enumerate(digests[:end]):
                    if digest in missing[group] and not read((group, digest)):
                        end = index
                        break
            for group in self._sliding:
                first = self._shape.first_needed(group, end * self.block_size)
                for digest in digests[first:end]:
                    if digest in missing[group]:
                        read((group, digest))

        fetch = Fetch(read_missing, self._generation)
        self._tiers.fetch(fetch, source)
        return fetch

    def restore(
        self, fetch: Fetch, table: BlockTable, token_ids: Sequence[int], *, headroom: int
    ) -> int:
        """Insert the blocks read for a sequence into the prefix cache, while blocks are free.

        Consumes the fetch. Blocks of the sequence that are already cached stay cached.

        Returns:
            Number of tokens restored from tiers. Tokens pulled from another engine are counted in
            `kv_transfer_hits` instead.
        """
        assert self._tiers is not None
        acquired = self._cached(self.match(table, token_ids))
        num_cached = len(acquired)
        self.pool.acquire(acquired)
        num_tokens = 0
        if fetch.generation == self._generation:
            index_of = {digest: index for index, digest in enumerate(table.digests)}
            for (group, digest), content in fetch.blocks:
                if self.pool.num_free <= headroom:
                    break
                if digest in self._caches[group].block_of:
                    continue
                ids = self.pool.allocate(1)
                assert ids is not None
                self._tiers.write_block(ids[0], content)
                self._caches[group].insert(digest, ids[0])
                self.pool.mark_cached(ids[0])
                self._report_stored(group, table, index_of[digest], token_ids)
                acquired += ids
                if group != self._reported_group:
                    continue
                if (group, digest) in fetch.pulled:
                    self._tiers.counters.kv_transfer_hits += self.block_size
                else:
                    num_tokens += self.block_size
        self._tiers.discard(fetch)
        self.pool.release([*reversed(acquired[num_cached:]), *reversed(acquired[:num_cached])])
        return num_tokens

    def discard(self, fetch: Fetch) -> None:
        """Drop the blocks read for a sequence that will not use them."""
        assert self._tiers is not None
        self._tiers.discard(fetch)

    def try_grow(self, table: BlockTable, num_tokens: int, headroom: int = 0) -> bool:
        """Append blocks until the table has room for `num_tokens` positions.

        Return False, with nothing changed, if not enough blocks are free.
        """
        num_blocks = -(-num_tokens // self.block_size)
        if len(table.groups) == 1:  # as below without lists: hot path of decodes
            group = table.groups[0]
            count = max(0, num_blocks - len(group.ids))
            if count + headroom > self.pool.num_free:
                return False
            group.ids += self.pool.allocate(count) or ()
            table.capacity = len(group.ids) * self.block_size
            table.num_blocks += count
            table.num_unsent += count
            return True
        num_new = [max(0, num_blocks - len(group.ids)) for group in table.groups]
        if sum(num_new) + headroom > self.pool.num_free:
            return False
        for group, count in zip(table.groups, num_new, strict=True):
            group.ids += self.pool.allocate(count) or ()
        self._measure(table)
        return True

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Make the blocks filled by the first `num_computed` tokens visible to other sequences."""
        if table.generation != self._generation:
            table.next_commit = NEVER
            return
        num_full = num_computed // self.block_size
        num_hashed = self._extend_digests(table, token_ids, num_full)
        self._remember(table, token_ids, num_hashed)
        tiers = self._tiers if self._tiers is not None and self._tiers.stores_all else None
        for number, (cache, group) in enumerate(zip(self._caches, table.groups, strict=True)):
            for index in range(table.num_committed, num_full):
                if cache.insert(table.digests[index], group.ids[index]):
                    self.pool.mark_cached(group.ids[index])
                    self._report_stored(number, table, index, token_ids)
                    if tiers is not None:
                        tiers.store((number, table.digests[index]), group.ids[index])
        if table.offered:
            self._offer(table, table.num_committed, num_full)
        table.num_committed = num_full
        table.next_commit = (num_full + 1) * self.block_size

    def release_behind(self, table: BlockTable, num_computed: int) -> None:
        """Free blocks that no token after the first `num_computed` attends to.

        Call it after `commit`. While the sequence lacks blocks for the tokens it was admitted with,
        it gets as many as it frees.
        """
        for number in self._sliding:
            group = table.groups[number]
            first = self._shape.first_needed(number, num_computed)
            passed = group.ids[group.first : first]
            self.pool.release(passed)
            group.ids[group.first : first] = [FREED] * len(passed)
            group.first += len(passed)
        self.refill(table)

    def refill(self, table: BlockTable) -> bool:
        """Allocate the blocks that sliding groups lack, as far as blocks are free.

        Return whether the capacity has grown.
        """
        before = table.capacity
        for number in self._sliding:
            group = table.groups[number]
            end = min(table.num_admitted, group.first + self._shape.spans[number])
            num_missing = max(0, end - len(group.ids))
            group.ids += self.pool.allocate(min(num_missing, self.pool.num_free)) or ()
        self._measure(table)
        return table.capacity > before

    def free(self, table: BlockTable) -> None:
        """Free all blocks of a table; the end of a prefix is evicted before its start."""
        self.pool.release(table.held())
        table.clear()

    def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes, also of running sequences; return the number of blocks."""
        num_forgotten = sum(len(cache.block_of) for cache in self._caches)
        for cache in self._caches:
            cache.clear()
        self.pool.forget_contents()
        self._generation += 1
        if self._events is not None:
            self._events.cleared()
        if self._log is not None:
            self._log.cleared()
        return num_forgotten

    def blocks_since(self, after: int) -> BlockChanges | None:
        """Return the blocks cached or evicted since change number `after`; see `BlockLog`."""
        if self._log is None:
            self._log = BlockLog(self._caches[self._reported_group].block_of.keys())
            self.pool.on_evict = self._evict
        return self._log.since(after)

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError if a block is leaked, wrongly shared or wrongly named."""
        tables = list(tables)
        self.pool.check_integrity([table.held() for table in tables])
        cached = self.pool.cached_blocks()
        for cache in self._caches:
            cache.check_integrity()
        named = [block_id for cache in self._caches for block_id in cache.digest_of]
        assert sorted(named) == sorted(cached), "named blocks differ from the cached blocks"
        for table in tables:
            assert table.num_blocks == len(table.held())
            for group, span in zip(table.groups, self._shape.spans, strict=False):
                assert group.first == group.ids.count(FREED), "a block is freed within the window"
                assert FREED not in group.ids[group.first :]
                assert len(group.ids) - group.first <= span, "a group holds too many blocks"

    def _evict(self, block_id: int) -> None:
        for number, cache in enumerate(self._caches):
            if block_id in cache.digest_of:
                digest = cache.evict(block_id)
                if self._log is not None and number == self._reported_group:
                    self._log.changed(digest, is_stored=False)
                if self._events is not None:
                    self._events.removed(number, digest)
                if self._tiers is not None and self._tiers.stores_evicted:
                    self._tiers.store((number, digest), block_id)

    def _offer(self, table: BlockTable, start: int, end: int) -> None:
        """Offer a sequence's blocks to another engine, except those behind a window."""
        if self._tiers is None:
            return
        for number, group in enumerate(table.groups):
            for index in range(max(start, group.first), end):
                self._tiers.offer((number, table.digests[index]), group.ids[index])

    def _report_stored(
        self, group: int, table: BlockTable, index: int, token_ids: Sequence[int]
    ) -> None:
        if self._log is not None and group == self._reported_group:
            self._log.changed(table.digests[index], is_stored=True)
        if self._events is not None:
            digests, start = table.digests[max(0, index - 1) : index + 1], index * self.block_size
            shown = shown_in(table.images, start, start + self.block_size)
            self._events.stored(group, table.root, digests, start, token_ids, shown)

    def _cached(self, matched: list[list[int]]) -> list[int]:
        if len(matched) == 1 and not self._sliding:
            return matched[0]
        return [block_id for ids in matched for block_id in ids if block_id != FREED]

    def _num_new_blocks(self, matched: list[list[int]], num_tokens: int) -> list[int]:
        blocks = -(-num_tokens // self.block_size)
        return [
            min(blocks - len(ids), span - (len(ids) - ids.count(FREED)))
            for ids, span in zip(matched, self._shape.spans, strict=True)
        ]

    def _match_windows(
        self, table: BlockTable, limit: int, matched: list[list[int]]
    ) -> list[list[int]]:
        """Shorten a match to a length at which all sliding groups have their window cached."""
        size, digests, first_needed = self.block_size, table.digests, self._shape.first_needed
        before = -1
        while before != limit:
            before = limit
            for group in self._sliding:
                block_of, index = self._caches[group].block_of, limit - 1
                while index >= first_needed(group, limit * size):
                    if digests[index] not in block_of:
                        limit = index
                    index -= 1
        for group in self._full_groups:
            del matched[group][limit:]
        for group in self._sliding:
            first = first_needed(group, limit * size)
            found = [self._caches[group].block_of.get(digest) for digest in digests[first:limit]]
            matched[group] = [FREED] * first + [each for each in found if each is not None]
        return matched

    def _measure(self, table: BlockTable) -> None:
        groups, size = table.groups, self.block_size
        table.capacity = min([len(group.ids) for group in groups]) * size
        table.num_blocks = sum([len(group.ids) - group.first for group in groups])
        table.num_unsent = sum([len(group.ids) - group.num_sent for group in groups])
        table.next_release = min(
            ((groups[n].first + 1) * size + window - 1 for n, window in self._sliding.items()),
            default=NEVER,
        )

    def _extend_digests(self, table: BlockTable, token_ids: Sequence[int], num_blocks: int) -> int:
        """Extend the digests to the first `num_blocks` blocks; return how many were hashed."""
        size, digests = self.block_size, table.digests
        num_hashed = 0
        while len(digests) < num_blocks:
            start = len(digests) * size
            parent = digests[-1] if digests else table.root
            shown = shown_in(table.images, start, start + size) if table.images else ()
            digest = block_digest(parent, token_ids[start : start + size], shown)
            num_hashed += 1
            is_known = not digests and not table.images
            digests += self._known.beginning(digest, token_ids) if is_known else [digest]
        return num_hashed

    def _remember(self, table: BlockTable, token_ids: Sequence[int], num_hashed: int) -> None:
        """Share a sequence's digests with others of the same tokens, unless it has images."""
        if not table.images:
            self._known.remember(table.digests, token_ids, num_hashed)
