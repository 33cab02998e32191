"""KV block events: contents, batches, and replay for subscribers."""

from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.events import (
    SNAPSHOT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Journal,
    KvEventLog,
)
from engine.scheduler.block_table import BlockTable, CacheShape
from engine.scheduler.kv_cache import KVCacheManager
from engine.shared.block_names import ROOT_DIGEST, block_digest
from engine.shared.messages import EncoderInput

SIZE = 4


class Batch(msgspec.Struct, array_like=True):
    """Decode a batch like vLLM's subscribers."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def decoded(content: bytes) -> Batch:
    return msgspec.msgpack.decode(content, type=Batch)


class Index:
    """A subscriber, which tracks an engine's blocks by group and hash."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int | None, bytes], tuple[bytes | None, list[int]]] = {}

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.blocks.clear()
                case BlockRemoved():
                    for digest in event.block_hashes:
                        del self.blocks[event.group_idx, digest]
                case BlockStored():
                    parent = event.parent_block_hash
                    for n, digest in enumerate(event.block_hashes):
                        tokens = event.token_ids[n * SIZE : (n + 1) * SIZE]
                        self.blocks[event.group_idx, digest] = (parent, tokens)
                        parent = digest


class Cache:
    """A KV cache and its published events."""

    def __init__(self, num_blocks: int, shape: CacheShape | None = None) -> None:
        self.published: list[Event] = []
        self.log = KvEventLog(SIZE, "CPU", self.published.extend)
        self.kv = KVCacheManager(
            num_blocks, SIZE, enable_prefix_caching=True, shape=shape, events=self.log
        )

    def compute(
        self,
        token_ids: list[int],
        root: bytes = ROOT_DIGEST,
        images: Sequence[EncoderInput] = (),
    ) -> None:
        """Compute and release a sequence with these tokens."""
        table = BlockTable(root, images)
        assert self.kv.try_admit(table, token_ids, use_cache=True, headroom=0) is not None
        self.kv.commit(table, token_ids, len(token_ids))
        self.kv.free(table)
        self.log.flush()


def test_sequence_is_one_event_with_tokens_and_computable_names() -> None:
    cache = Cache(8)
    cache.compute(list(range(10)))
    first = block_digest(ROOT_DIGEST, [0, 1, 2, 3])
    second = block_digest(first, [4, 5, 6, 7])
    assert cache.published == [
        BlockStored([first, second], None, list(range(8)), SIZE, None, "CPU", None, None, 0)
    ]
    cache.compute([*range(8), 90, 91, 92, 93])
    third = block_digest(second, [90, 91, 92, 93])
    assert cache.published[1:] == [
        BlockStored([third], second, [90, 91, 92, 93], SIZE, None, "CPU", None, None, 0)
    ]


def test_blocks_with_salt_report_root_of_their_names() -> None:
    cache = Cache(8)
    root = bytes(range(len(ROOT_DIGEST)))
    cache.compute(list(range(8)), root)
    [event] = cache.published
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [[root.hex()], [root.hex()]]


def test_blocks_with_images_report_extra_keys_of_their_names() -> None:
    cache = Cache(8)
    image = EncoderInput(2, 4, b"i" * 16, 2, 2, b"")
    cache.compute(list(range(12)), images=[image])
    shown, text = cache.published
    assert isinstance(shown, BlockStored)
    assert isinstance(text, BlockStored)
    places = [image.digest + place.to_bytes(8, "little", signed=True) for place in (-2, 2)]
    assert shown.extra_keys == [[place.hex()] for place in places]
    first = block_digest(ROOT_DIGEST, [0, 1, 2, 3], places[:1])
    second = block_digest(first, [4, 5, 6, 7], places[1:])
    assert shown.block_hashes == [first, second]
    assert text.block_hashes == [block_digest(second, [8, 9, 10, 11])]
    assert text.extra_keys is None


def test_overwritten_blocks_are_removed_and_reset_clears_all() -> None:
    cache = Cache(2)
    cache.compute(list(range(8)))
    cache.compute(list(range(100, 108)))
    removed = [each for each in cache.published if isinstance(each, BlockRemoved)]
    assert sum(len(each.block_hashes) for each in removed) == 2
    cache.kv.reset_prefix_cache()
    assert cache.published[-1] == AllBlocksCleared()


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
@given(sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=16), max_size=20))
def test_subscriber_knows_exactly_the_cached_blocks(
    windows: tuple[int | None, ...], sequences: list[list[int]]
) -> None:
    cache, index = Cache(10, CacheShape(SIZE, windows, 16)), Index()
    for tokens in sequences:
        cache.compute(tokens)
        index.apply(cache.published)
        cache.published.clear()
        found = {
            (number, digest)
            for number, each in enumerate(cache.kv._caches)
            for digest in each.block_of
        }
        assert set(index.blocks) == found


def stored(digest: bytes, parent: bytes | None = None) -> BlockStored:
    return BlockStored([digest], parent, [1] * SIZE, SIZE, None, "CPU", None, None, 0)


def test_batches_are_numbered_and_can_be_replayed() -> None:
    journal = Journal(3, 10)
    batches = [journal.add([stored(bytes([n]))], n) for n in range(4)]
    assert [number for number, _ in batches] == [0, 1, 2, 3]
    assert decoded(batches[1][1]) == Batch(1.0, [stored(b"\x01")], 3)
    assert journal.replay(2, 9) == batches[2:]
    assert journal.replay(4, 9) == []


@pytest.mark.parametrize("start", [0, 1, SNAPSHOT])
def test_a_replay_of_dropped_batches_returns_all_blocks_in_one_batch(start: int) -> None:
    journal = Journal(0, 2)
    journal.add([stored(b"a"), stored(b"b", b"a")], 0)
    journal.add([BlockRemoved([b"b"], "CPU", 0)], 1)
    journal.add([stored(b"c", b"a")], 2)
    journal.add([stored(b"d", b"c")], 3)
    [(number, content)] = journal.replay(start, 9)
    assert number == 3
    assert decoded(content).events == [
        AllBlocksCleared(), stored(b"a"), stored(b"c", b"a"), stored(b"d", b"c")
    ]  # fmt: skip


def test_nothing_is_replayed_before_the_first_batch() -> None:
    assert Journal(0, 2).replay(SNAPSHOT, 0) == []
    assert Journal(0, 2).replay(0, 0) == []
