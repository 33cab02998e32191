"""Copies KV blocks to the stores and back, concurrently with the engine's steps.

A block is copied from the KV cache in the engine's thread, while nothing writes to it, and stored
by another thread. Blocks that a prompt can use are read while its request waits, and copied into
the KV cache at admission.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal, Protocol

from engine.kv.block_store import BlockStore
from engine.kv.connector import ConnectedStore
from engine.shared.messages import EngineCounters, KvSource

MAX_UNWRITTEN_BYTES = 256 << 20
"""Maximum bytes queued for writing; further blocks are not stored."""
MAX_FETCHED_BYTES = 512 << 20
"""Maximum fetched bytes whose requests await admission; further blocks are recomputed."""
FETCH_TIMEOUT = 5.0
"""Seconds that a request waits for its blocks before it starts with those that have arrived."""

_NUM_READERS = 2
_MAX_RECENT = 1 << 16
_SECONDS_BETWEEN_WARNINGS = 60.0

logger = logging.getLogger(__name__)

BlockName = tuple[int, bytes]
"""Layer group, and digest of all tokens up to the block's end."""


@dataclass(eq=False)
class Fetch:
    """Blocks read for one request."""

    read_missing: Callable[[Callable[[BlockName], bool]], None]
    """Calls its argument for each useful block; the argument returns whether the block was
    obtained."""
    generation: int
    """Generation of the prefix cache that they are for."""
    blocks: list[tuple[BlockName, bytes]] = field(default_factory=list)
    settled: bool = False
    """Whether no more blocks are coming."""
    model: bytes = b""
    deadline: float = 0.0
    num_bytes: int = 0
    pulled: set[BlockName] = field(default_factory=set)
    """Blocks that came from another engine."""


class Peers(Protocol):
    """Other engines (`engine.kv`). All methods but `shutdown` return immediately."""

    def offer(self, key: bytes, read: Callable[[], bytes]) -> None:
        """Let another engine read a block once; `read` returns its content if needed."""

    def pull(
        self,
        source: KvSource,
        model: bytes,
        wanted: Sequence[BlockName],
        take: Callable[[BlockName, bytes], bool],
        over: Callable[[bool], None],
    ) -> None:
        """Pass blocks to `take`, from another thread, while it returns True, then call `over`.

        The argument of `over` is whether all have arrived.
        """

    def clear(self) -> None:
        """Withdraw all offers made so far."""

    def shutdown(self) -> None:
        """End all transfers; idempotent."""


class KvTiers:
    """The stores of one engine, fastest first. All methods but `shutdown` return immediately.

    Args:
        stores: a block is written to each, and read from the first that has it.
        policy: stores all full blocks, or only evicted ones.
        read_block: returns the content of a KV cache block.
        write_block: overwrites it.
        peers: other engines, if blocks are exchanged with them.
        counters: the engine's counters; new ones by default.
    """

    def __init__(
        self,
        stores: Sequence[BlockStore | ConnectedStore],
        policy: Literal["all", "evicted"],
        read_block: Callable[[int], bytes],
        write_block: Callable[[int, bytes], None],
        *,
        peers: Peers | None = None,
        counters: EngineCounters | None = None,
    ) -> None:
        self.model = b""
        """Key prefix that separates blocks of different weights, formats and versions."""
        self.on_settled: Callable[[], None] = lambda: None
        """Called from another thread when a fetch is settled."""
        self.stores_all = policy == "all" and bool(stores)
        self.stores_evicted = policy == "evicted" and bool(stores)
        self.write_block = write_block
        self.counters = EngineCounters() if counters is None else counters
        """Counters of its engine."""
        self._stores = stores
        self._peers = peers
        self._read_block = read_block
        self._changed = threading.Condition()
        self._unwritten: deque[tuple[bytes, bytes | None]] = deque()
        """Keys and contents to write; content None removes all blocks of the model."""
        self._unwritten_bytes = self._fetched_bytes = 0
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        """Keys last stored by this engine, in LRU order."""
        self._requested: SimpleQueue[Fetch | None] = SimpleQueue()
        self._unsettled: deque[Fetch] = deque()
        self._is_over = False
        self._warned_at = -_SECONDS_BETWEEN_WARNINGS
        runs = [self._write_blocks, self._end_late_fetches, *[self._read_blocks] * _NUM_READERS]
        self._threads = [
            threading.Thread(target=run, name=f"kv-tiers-{number}", daemon=True)
            for number, run in enumerate(runs if stores else ())
        ]
        for thread in self._threads:
            thread.start()

    def store(self, name: BlockName, block_id: int) -> None:
        """Store the current content of a KV cache block."""
        key = _key(self.model, name)
        if key in self._recent:
            return
        if self._unwritten_bytes > MAX_UNWRITTEN_BYTES:
            self.counters.kv_tier_dropped_blocks += 1
            return
        content = self._read_block(block_id)
        self._recent[key] = None
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)
        with self._changed:
            self._unwritten.append((key, content))
            self._unwritten_bytes += len(content)
            self._changed.notify_all()

    def offer(self, name: BlockName, block_id: int) -> None:
        """Offer the current content of a KV cache block to another engine."""
        if self._peers is not None:
            self._peers.offer(_key(self.model, name), lambda: self._read_block(block_id))

    def clear(self) -> None:
        """Remove all blocks of the model, including those stored by other engines."""
        if self._peers is not None:
            self._peers.clear()
        self._recent.clear()
        if not self._stores:
            return
        with self._changed:
            self._unwritten.append((self.model, None))
            self._changed.notify_all()

    def can_fetch(self, source: KvSource | None) -> bool:
        """Return whether there is any place to read blocks from."""
        return bool(self._stores) or (source is not None and self._peers is not None)

    def fetch(self, fetch: Fetch, source: KvSource | None = None) -> None:
        """Start reading blocks, first from a `source` that has just computed them, if given.

        The fetch settles in bounded time, regardless of stores and peers.
        """
        fetch.model = self.model
        if source is None or self._peers is None:
            self._fetch_from_stores(fetch)
            return
        names: list[BlockName] = []

        def note(name: BlockName) -> bool:
            names.append(name)
            return True

        fetch.read_missing(note)

        def take(name: BlockName, content: bytes) -> bool:
            taken = self._add_block(fetch, name, content)
            if taken:
                fetch.pulled.add(name)
            return taken

        def over(has_all: bool) -> None:
            if has_all or not self._stores:
                self._settle(fetch)
            else:
                self._fetch_from_stores(fetch)

        self._peers.pull(source, fetch.model, names, take, over)

    def _fetch_from_stores(self, fetch: Fetch) -> None:
        fetch.deadline = time.monotonic() + FETCH_TIMEOUT
        with self._changed:
            self._unsettled.append(fetch)
            self._changed.notify_all()
        self._requested.put(fetch)

    def discard(self, fetch: Fetch) -> None:
        """Release the blocks of a fetch that were used or will not be."""
        with self._changed:
            fetch.settled = True
            self._fetched_bytes -= fetch.num_bytes
            fetch.num_bytes = 0
            fetch.blocks = []
            self._changed.notify_all()

    def shutdown(self, timeout: float = 10.0) -> None:
        """Store queued blocks, in bounded time, and end the threads; idempotent."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for _ in range(_NUM_READERS):
            self._requested.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._peers is not None:
            self._peers.shutdown()
        for store in self._stores:
            store.close()

    # -- threads ---------------------------------------------------------------------------------

    def _write_blocks(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unwritten or self._is_over)
                if not self._unwritten:
                    return
                key, content = self._unwritten[0]
            if content is None:
                for store in self._stores:
                    try:
                        store.clear(key)
                    except Exception as error:  # plugins may raise anything
                        self._warn("KV blocks were not removed: %s", error)
            else:
                self._write(key, content)
            with self._changed:
                self._unwritten.popleft()
                self._unwritten_bytes -= len(content or b"")

    def _write(self, key: bytes, content: bytes) -> None:
        for store in self._stores:
            try:
                if store.write(key, content):
                    self.counters.kv_tier_stored_bytes += len(content)
            except Exception as error:
                self.counters.kv_tier_dropped_blocks += 1
                self._warn("a KV block was not stored: %s", error)

    def _read_blocks(self) -> None:
        while (fetch := self._requested.get()) is not None:
            fetch.read_missing(lambda name, fetch=fetch: self._read(fetch, name))  # type: ignore[misc]
            self._settle(fetch)

    def _read(self, fetch: Fetch, name: BlockName) -> bool:
        if fetch.settled or self._fetched_bytes > MAX_FETCHED_BYTES:
            return False
        if name in fetch.pulled:
            return True
        content = self._find(_key(fetch.model, name))
        return content is not None and self._add_block(fetch, name, content)

    def _add_block(self, fetch: Fetch, name: BlockName, content: bytes) -> bool:
        with self._changed:
            if fetch.settled or self._fetched_bytes > MAX_FETCHED_BYTES:
                return False
            fetch.blocks.append((name, content))
            fetch.num_bytes += len(content)
            self._fetched_bytes += len(content)
        return True

    def _find(self, key: bytes) -> bytes | None:
        for store in self._stores:
            try:
                content = store.read(key)
            except Exception as error:
                self._warn("a KV block is recomputed: %s", error)
                continue
            if content is not None:
                return content
        return None

    def _end_late_fetches(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsettled or self._is_over)
                if self._is_over:
                    return
                oldest = self._unsettled.popleft()
                while not (oldest.settled or self._is_over):
                    remaining = oldest.deadline - time.monotonic()
                    if remaining <= 0:
                        break
                    self._changed.wait(remaining)
            if not oldest.settled:
                self._warn("KV blocks were not read within %.0f s", FETCH_TIMEOUT)
            self._settle(oldest)

    def _settle(self, fetch: Fetch) -> None:
        with self._changed:
            if fetch.settled:
                return
            fetch.settled = True
            self._changed.notify_all()
        self.on_settled()

    def _warn(self, message: str, *arguments: object) -> None:
        """Count an error, and log at most one per minute."""
        self.counters.kv_tier_errors += 1
        now = time.monotonic()
        if now - self._warned_at >= _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = now
            logger.warning(message, *arguments)


def _key(model: bytes, name: BlockName) -> bytes:
    group, digest = name
    return model + bytes([group]) + digest
