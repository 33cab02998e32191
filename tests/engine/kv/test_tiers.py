"""Copies between the KV cache and its tiers, with arbitrary store behavior."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from engine.kv import tiers as module
from engine.kv.block_store import BadBlock, BlockStore
from engine.kv.tiers import BlockName, Fetch, KvTiers
from engine.shared.messages import KvSource
from tests.support.waiting import PATIENCE, until

NAME: BlockName = (0, b"d" * 16)


class Store:
    """Stores blocks in a dict; fails on demand."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.error: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()

    def read(self, key: bytes) -> bytes | None:
        self.goes_on.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return self.blocks.get(key)

    def write(self, key: bytes, content: bytes) -> bool:
        self.goes_on.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        self.blocks[key] = content
        return True

    def clear(self, model: bytes) -> None:
        self.blocks = {key: each for key, each in self.blocks.items() if not key.startswith(model)}

    def close(self) -> None:
        pass


class PlayedPeers:
    """Records requests to other engines, which the test answers."""

    def __init__(self) -> None:
        self.wanted: Sequence[BlockName] = ()
        self.take: Callable[[BlockName, bytes], bool] = lambda *_: False
        self.over: Callable[[bool], None] = lambda _: None
        self.offered: dict[bytes, bytes] = {}

    def offer(self, key: bytes, read: Callable[[], bytes]) -> None:
        self.offered[key] = read()

    def pull(
        self,
        source: KvSource,
        model: bytes,
        wanted: Sequence[BlockName],
        take: Callable[[BlockName, bytes], bool],
        over: Callable[[bool], None],
    ) -> None:
        self.wanted, self.take, self.over = wanted, take, over

    def clear(self) -> None:
        self.offered.clear()

    def shutdown(self) -> None: ...


def tiers_of(*stores: Store, peers: PlayedPeers | None = None) -> KvTiers:
    memory = {n: bytes([n]) * 100 for n in range(9)}
    return KvTiers(
        cast("list[BlockStore]", list(stores)),
        "all",
        memory.__getitem__,
        lambda *_: None,
        peers=peers,
    )


def fetched(tiers: KvTiers, *names: BlockName) -> Fetch:
    """Return the completed fetch of these blocks, up to the first missing one."""

    def read_missing(read: Callable[[BlockName], bool]) -> None:
        all(read(name) for name in names)

    fetch = Fetch(read_missing, 0)
    tiers.fetch(fetch)
    until(lambda: fetch.settled, "the fetch is settled")
    return fetch


def test_a_block_is_written_to_all_and_read_from_the_first_that_has_it() -> None:
    fast, slow = Store(), Store()
    tiers = tiers_of(fast, slow)
    tiers.store(NAME, 3)
    until(lambda: tiers.counters.kv_tier_stored_bytes == 200, "it is stored")
    assert fast.blocks == slow.blocks
    fast.blocks.clear()
    assert fetched(tiers, NAME).blocks == [(NAME, bytes([3]) * 100)]
    tiers.shutdown()


def test_blocks_up_to_one_that_is_missing_are_read() -> None:
    tiers = tiers_of(Store())
    for block in (1, 2):
        tiers.store((0, bytes([block])), block)
    tiers.shutdown()
    names = [(0, bytes([n])) for n in (1, 2, 3)]
    again = tiers_of(*cast("list[Store]", tiers._stores))
    assert [name for name, _ in fetched(again, *names).blocks] == names[:2]
    again.shutdown()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BadBlock("damaged")])
def test_a_store_that_fails_is_a_miss(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    failing, right = Store(), Store()
    tiers = tiers_of(failing, right)
    failing.error = error
    if isinstance(error, OSError):
        tiers.store(NAME, 3)
        until(lambda: bool(right.blocks), "it is stored")
        assert tiers.counters.kv_tier_dropped_blocks == 1
    right.blocks[b"\0" + NAME[1]] = b"content"
    assert fetched(tiers, NAME).blocks == [(NAME, b"content")]
    assert tiers.counters.kv_tier_errors
    assert str(error) in caplog.text
    tiers.shutdown()


def test_a_store_that_hangs_holds_a_request_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FETCH_TIMEOUT", 0.05)
    store = Store()
    tiers = tiers_of(store)
    settled = threading.Event()
    tiers.on_settled = settled.set
    store.goes_on.clear()
    fetch = fetched(tiers, NAME)
    assert settled.wait(PATIENCE)
    store.blocks[b"\0" + NAME[1]] = b"late"
    store.goes_on.set()
    tiers.shutdown()
    assert not fetch.blocks, "what comes late is not taken"


def test_excess_writes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNWRITTEN_BYTES", 250)
    store = Store()
    tiers = tiers_of(store)
    store.goes_on.clear()
    for n in range(9):
        tiers.store((0, bytes([n])), n)
    assert tiers.counters.kv_tier_dropped_blocks == 6
    store.goes_on.set()
    tiers.shutdown()
    assert len(store.blocks) == 3


def test_unclaimed_contents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FETCHED_BYTES", 250)
    store = Store()
    store.blocks = {b"\0" + bytes([n]): bytes(100) for n in range(9)}
    tiers = tiers_of(store)
    first = fetched(tiers, *[(0, bytes([n])) for n in range(9)])
    assert len(first.blocks) == 3
    assert not fetched(tiers, (0, b"\0")).blocks
    tiers.discard(first)
    assert fetched(tiers, (0, b"\0")).blocks
    tiers.shutdown()


def test_a_reset_drops_stored_blocks(tmp_path: Path) -> None:
    store = Store()
    tiers = tiers_of(store)
    tiers.store(NAME, 3)
    tiers.clear()
    tiers.store(NAME, 4)
    tiers.shutdown()
    assert list(store.blocks.values()) == [bytes([4]) * 100]


def test_blocks_of_other_weights_are_not_found() -> None:
    store = Store()
    tiers = tiers_of(store)
    tiers.model = b"a"
    tiers.store(NAME, 3)
    tiers.model = b"b"
    tiers.store(NAME, 4)
    until(lambda: len(store.blocks) == 2, "both are stored")
    assert fetched(tiers, NAME).blocks == [(NAME, bytes([4]) * 100)]
    tiers.model = b"a"
    assert fetched(tiers, NAME).blocks == [(NAME, bytes([3]) * 100)]
    tiers.shutdown()


NAMES: list[BlockName] = [(0, bytes([n]) * 16) for n in range(3)]
SOURCE = KvSource("ipc://x", 1)


def pulling(tiers: KvTiers) -> Fetch:
    """Return the fetch of three blocks from another engine."""

    def read_missing(read: Callable[[BlockName], bool]) -> None:
        all(read(name) for name in NAMES)

    fetch = Fetch(read_missing, 0)
    tiers.fetch(fetch, SOURCE)
    return fetch


def test_blocks_of_other_engine_complete_a_fetch_without_stores() -> None:
    peers = PlayedPeers()
    tiers = tiers_of(Store(), peers=peers)
    fetch = pulling(tiers)
    assert peers.wanted == NAMES
    assert all(peers.take(name, b"content") for name in NAMES)
    assert not fetch.settled
    peers.over(True)
    assert fetch.settled
    assert fetch.blocks == [(name, b"content") for name in NAMES]
    assert fetch.pulled == set(NAMES)
    tiers.shutdown()


def test_blocks_missing_on_other_engine_are_read_from_stores() -> None:
    peers, store = PlayedPeers(), Store()
    tiers = tiers_of(store, peers=peers)
    for block, name in enumerate(NAMES):
        tiers.store(name, block)
    until(lambda: len(store.blocks) == 3, "they are stored")
    fetch = pulling(tiers)
    peers.take(NAMES[0], b"pulled")
    peers.over(False)
    until(lambda: fetch.settled, "the rest is read")
    assert fetch.blocks == [
        (NAMES[0], b"pulled"), (NAMES[1], bytes([1]) * 100), (NAMES[2], bytes([2]) * 100),
    ]  # fmt: skip
    tiers.shutdown()


def test_fetch_without_stores_completes_with_received_blocks() -> None:
    peers = PlayedPeers()
    tiers = tiers_of(peers=peers)
    assert not tiers.can_fetch(None)
    assert tiers.can_fetch(SOURCE)
    fetch = pulling(tiers)
    peers.take(NAMES[0], b"pulled")
    peers.over(False)
    assert fetch.settled
    assert [name for name, _ in fetch.blocks] == NAMES[:1]
    tiers.shutdown()


def test_discarded_fetch_accepts_no_more_blocks() -> None:
    peers = PlayedPeers()
    tiers = tiers_of(Store(), peers=peers)
    fetch = pulling(tiers)
    assert peers.take(NAMES[0], b"pulled")
    tiers.discard(fetch)
    assert not peers.take(NAMES[1], b"pulled")
    peers.over(False)
    assert (fetch.blocks, fetch.num_bytes) == ([], 0)
    tiers.shutdown()


def test_memory_for_received_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FETCHED_BYTES", 10)
    peers = PlayedPeers()
    tiers = tiers_of(peers=peers)
    pulling(tiers)
    assert [peers.take(name, bytes(8)) for name in NAMES] == [True, True, False]
    tiers.shutdown()


def test_offers_are_named_like_stored_blocks_and_cleared_with_them() -> None:
    peers, store = PlayedPeers(), Store()
    tiers = tiers_of(store, peers=peers)
    tiers.offer(NAME, 3)
    tiers.store(NAME, 3)
    until(lambda: store.blocks, "it is stored")
    assert peers.offered == store.blocks
    tiers.clear()
    assert not peers.offered
    tiers.shutdown()
