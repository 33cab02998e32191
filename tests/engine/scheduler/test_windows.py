"""Sliding-window layer groups free exactly the blocks behind their window."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.block_table import FREED, BlockTable, CacheShape, lookahead_tokens
from engine.scheduler.kv_cache import KVCacheManager
from engine.shared.block_names import ROOT_DIGEST, block_digest
from engine.shared.config import SchedulerConfig
from tests.engine.scheduler.conftest import Rig

WINDOWS = st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=4)


def manager(
    num_blocks: int, size: int, windows: Sequence[int | None], lookahead: int
) -> KVCacheManager:
    shape = CacheShape(size, windows, lookahead)
    return KVCacheManager(num_blocks, size, enable_prefix_caching=True, shape=shape)


def compute(kv: KVCacheManager, token_ids: list[int], chunk: int) -> BlockTable:
    """Compute a prompt in chunks, each as long as there is room for."""
    table = BlockTable()
    done = kv.try_admit(table, token_ids, use_cache=True, headroom=0)
    assert done is not None
    while done < len(token_ids):
        end = min(len(token_ids), done + chunk, table.capacity)
        assert end > done, "no room for any token"
        done = end
        kv.commit(table, token_ids, done)
        kv.release_behind(table, done)
        kv.check_integrity([table])
    return table


def test_blocks_of_sliding_layers_at_8192_tokens_equal_formula() -> None:
    """The groups of a Gemma 3 with 26 layers: four layers each, five of six slide over 512."""
    windows = [None, *[512] * 6]
    kv = manager(20_000, 16, windows, 2048)
    table = compute(kv, list(range(8192)), 2048)
    # The next token is at 8192: it attends to 7681 and what follows, from block 480 on.
    assert table.num_blocks == 8192 // 16 + 6 * (512 - 480)
    assert kv.usage == pytest.approx(table.num_blocks / 20_000)
    assert all(table.groups[n].first == 480 for n in range(1, 7))
    assert CacheShape(16, windows, 2048).blocks_for(8192) == 512 + 6 * (-(-(511 + 2048) // 16) + 1)
    assert manager(20_000, 16, [None] * 7, 2048).needs(
        BlockTable(), list(range(8192)), use_cache=True
    ) == (0, 7 * 512)


@settings(max_examples=200)
@given(
    windows=WINDOWS,
    size=st.integers(1, 5),
    length=st.integers(1, 60),
    chunk=st.integers(1, 20),
    lookahead=st.integers(1, 20),
    decodes=st.integers(0, 20),
)
def test_only_blocks_behind_the_window_are_freed(
    windows: list[int | None], size: int, length: int, chunk: int, lookahead: int, decodes: int
) -> None:
    kv = manager(400, size, windows, lookahead)
    shape = CacheShape(size, windows, lookahead)
    tokens = list(range(length + decodes))
    table = compute(kv, tokens[:length], chunk)
    max_blocks = table.num_blocks
    for computed in range(length + 1, length + decodes + 1):
        assert kv.try_grow(table, computed)
        kv.commit(table, tokens[:computed], computed)
        kv.release_behind(table, computed)
        kv.check_integrity([table])
        max_blocks = max(max_blocks, table.num_blocks)
        for group, window in zip(table.groups, windows, strict=True):
            first = 0 if window is None else max(0, computed - window + 1) // size
            assert group.ids[:first] == [FREED] * min(first, len(group.ids))
            assert group.first == first
    assert max_blocks <= shape.blocks_for(len(tokens))
    kv.free(table)
    assert kv.usage == 0
    kv.check_integrity([])


@settings(max_examples=200)
@given(
    windows=WINDOWS,
    size=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    length=st.integers(1, 44),
    num_blocks=st.integers(48, 200),
    chunk=st.integers(1, 16),
)
def test_hit_is_longest_prefix_usable_by_all_groups(
    windows: list[int | None],
    size: int,
    lengths: list[int],
    length: int,
    num_blocks: int,
    chunk: int,
) -> None:
    kv = manager(num_blocks * len(windows), size, windows, chunk)
    shape = CacheShape(size, windows, chunk)
    tokens = list(range(44))
    for each in lengths:  # later ones evict some of the blocks of those before
        kv.free(compute(kv, tokens[:each] + [100 + each] * 8, chunk))
    digests, parent = [], ROOT_DIGEST
    for index in range((length - 1) // size):
        parent = block_digest(parent, tokens[index * size : (index + 1) * size])
        digests.append(parent)
    longest = max(
        count
        for count in range(len(digests) + 1)
        if all(
            digest in kv._caches[group].block_of
            for group in range(len(windows))
            for digest in digests[shape.first_needed(group, count * size) : count]
        )
    )
    found = kv.match(BlockTable(), tokens[:length])
    assert [len(ids) for ids in found] == [longest] * len(windows)
    for group, ids in enumerate(found):
        first = shape.first_needed(group, longest * size)
        assert ids == [FREED] * first + [
            kv._caches[group].block_of.get(digest) for digest in digests[first:longest]
        ]


@given(
    windows=WINDOWS,
    size=st.integers(1, 5),
    lookahead=st.integers(1, 30),
    num_blocks=st.integers(0, 60),
    limit=st.integers(1, 80),
)
def test_the_longest_sequence_is_the_longest_that_fits(
    windows: list[int | None], size: int, lookahead: int, num_blocks: int, limit: int
) -> None:
    shape = CacheShape(size, windows, lookahead)
    longest = shape.longest(num_blocks, limit)
    assert shape.blocks_for(longest) <= num_blocks
    assert longest == limit or shape.blocks_for(longest + 1) > num_blocks
    if windows == [None]:
        assert longest == min(limit, num_blocks * size)


def test_lookahead_covers_steps_in_flight_and_one_more() -> None:
    scheduling = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100)
    assert lookahead_tokens(scheduling, 1000) == 2 * 101
    assert lookahead_tokens(scheduling, 1000, num_stages=3) == 4 * 101
    assert lookahead_tokens(scheduling, 50) == 2 * 51
    assert lookahead_tokens(scheduling, 1000, in_one_step=True) == 1000


def test_a_sequence_longer_than_all_blocks_runs_in_its_window() -> None:
    rig = Rig(
        num_kv_blocks=16, max_num_batched_tokens=8, max_model_len=128, cache_windows=(9,)
    )  # 64 tokens
    assert rig.scheduler.max_model_len == 128
    rig.add(1, [1 + i % 7 for i in range(100)], max_tokens=28)
    rig.run()
    rig.assert_complete()
    rig.assert_idle()
    assert not rig.scheduler.counters.preemptions


def test_hit_needs_only_last_window_of_sliding_groups() -> None:
    rig = Rig(num_kv_blocks=200, max_model_len=128, cache_windows=(None, 9))
    prompt = [1 + i % 7 for i in range(80)]
    rig.add(1, prompt)
    rig.run()
    rig.add(2, [*prompt, 3, 4, 5])
    rig.run()
    rig.assert_complete()
    assert rig.scheduler.counters.prefix_cache_hits == 80
    assert rig.scheduler.counters.prefix_cache_queries == 163


def test_shared_blocks_do_not_stall_a_prefill() -> None:
    """A prompt that gets no block for those that it frees, since others hold these, goes on."""
    shared = [1 + i % 7 for i in range(24)]
    rig = Rig(
        num_kv_blocks=14, max_num_batched_tokens=6, max_num_seqs=4, max_model_len=60,
        cache_windows=(24,),
    )  # fmt: skip
    for id in range(4):
        rig.add(id, [*shared, *[10 + id] * (20 + id)], max_tokens=8)
    rig.run()
    rig.assert_complete()
    rig.assert_idle()
