import pytest

from engine.scheduler.block_table import BlockTable
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.prefix_cache import PrefixCache
from engine.shared.block_names import ROOT_DIGEST, block_digest


@pytest.fixture
def kv() -> KVCacheManager:
    return KVCacheManager(8, 4, enable_prefix_caching=True)


def admit(kv: KVCacheManager, token_ids: list[int], headroom: int = 0) -> tuple[BlockTable, int]:
    table = BlockTable()
    cached = kv.try_admit(table, token_ids, use_cache=True, headroom=headroom)
    assert cached is not None
    return table, cached


def matched(kv: KVCacheManager, table: BlockTable, token_ids: list[int]) -> list[int]:
    (of_group,) = kv.match(table, token_ids)
    return of_group


def compute(kv: KVCacheManager, token_ids: list[int]) -> BlockTable:
    table, _ = admit(kv, token_ids)
    kv.commit(table, token_ids, len(token_ids))
    return table


def test_digests_are_the_same_in_every_process() -> None:
    first = block_digest(ROOT_DIGEST, [1, 2, 3, 4])
    assert first.hex() == "f23680cf9d0cdff61c7fe464c491f63b"
    assert block_digest(first, [1, 2, 3, 4]) != first


def test_two_blocks_with_one_content_have_one_name() -> None:
    cache = PrefixCache()
    digest = block_digest(ROOT_DIGEST, [1])
    assert cache.insert(digest, 5)
    assert not cache.insert(digest, 6)
    assert cache.block_of.get(digest) == 5
    cache.evict(5)
    assert cache.block_of.get(digest) is None
    cache.check_integrity()
    assert not cache.digest_of


def test_a_computed_prefix_is_shared_while_its_owner_runs(kv: KVCacheManager) -> None:
    tokens = list(range(10))
    owner = compute(kv, tokens)
    table, cached = admit(kv, [*tokens[:8], 99])
    assert cached == 8
    assert table.groups[0].ids[:2] == owner.groups[0].ids[:2]
    assert table.groups[0].ids[2] != owner.groups[0].ids[2]
    kv.check_integrity([owner, table])


def test_sequences_with_different_roots_do_not_find_each_others_blocks(kv: KVCacheManager) -> None:
    tokens = list(range(10))
    compute(kv, tokens)
    salted = BlockTable(b"salt" * 4)
    assert matched(kv, salted, tokens) == []
    assert kv.try_admit(salted, tokens, use_cache=True, headroom=0) == 0
    kv.commit(salted, tokens, len(tokens))
    assert matched(kv, BlockTable(b"salt" * 4), tokens) == salted.groups[0].ids[:2]
    assert not set(matched(kv, BlockTable(), tokens)) & set(salted.groups[0].ids)


def test_nothing_is_shared_before_it_is_computed(kv: KVCacheManager) -> None:
    tokens = list(range(10))
    table, _ = admit(kv, tokens)
    kv.commit(table, tokens, 7)
    assert matched(kv, BlockTable(), tokens) == table.groups[0].ids[:1]


@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_at_least_one_token_is_left_to_compute(kv: KVCacheManager, length: int) -> None:
    tokens = list(range(length))
    kv.free(compute(kv, tokens))
    _, cached = admit(kv, tokens)
    assert cached == (length - 1) // 4 * 4


def test_a_prefix_only_counts_from_its_start(kv: KVCacheManager) -> None:
    tokens = list(range(12))
    kv.free(compute(kv, tokens))
    assert matched(kv, BlockTable(), [50, *tokens[1:]]) == []
    assert len(matched(kv, BlockTable(), [*tokens[:4], 50, *tokens[5:], 1])) == 1


def test_the_end_of_a_prefix_is_evicted_before_its_start(kv: KVCacheManager) -> None:
    tokens = list(range(32))
    kv.free(compute(kv, tokens))
    other, _ = admit(kv, list(range(100, 112)))
    assert len(matched(kv, BlockTable(), tokens)) == 5
    kv.check_integrity([other])


def test_an_older_prefix_is_evicted_before_a_newer_one(kv: KVCacheManager) -> None:
    old, new = list(range(16)), list(range(100, 116))
    kv.free(compute(kv, old))
    kv.free(compute(kv, new))
    kv.free(admit(kv, [*old, 1])[0])
    admit(kv, list(range(200, 212)))
    assert len(matched(kv, BlockTable(), [*old, 1])) == 4
    assert len(matched(kv, BlockTable(), [*new, 1])) == 1


def test_matched_blocks_count_as_taken_when_the_rest_has_to_fit(kv: KVCacheManager) -> None:
    tokens = list(range(16))
    kv.free(compute(kv, tokens))
    admit(kv, list(range(100, 116)))
    # Four free blocks, all of them cached: the prefix fits, but no fifth block beside it.
    table = BlockTable()
    assert kv.try_admit(table, [*tokens, 1], use_cache=True, headroom=0) is None
    assert table.held() == []
    assert admit(kv, tokens)[1] == 12


def test_headroom_stays_free(kv: KVCacheManager) -> None:
    table = BlockTable()
    assert kv.try_admit(table, list(range(20)), use_cache=True, headroom=4) is None
    admit(kv, list(range(20)), headroom=3)


def test_growth_takes_exactly_the_missing_blocks(kv: KVCacheManager) -> None:
    table, _ = admit(kv, [1, 2, 3])
    table.take_new(0)
    assert kv.try_grow(table, 4)
    assert not table.num_unsent
    assert kv.try_grow(table, 9)
    (grown,) = table.take_new(0)
    assert (grown.group, grown.first, len(grown.block_ids)) == (0, 1, 2)
    assert table.capacity == 12
    assert kv.usage == 3 / 8
    assert not kv.try_grow(table, 33)
    kv.free(table)
    assert kv.usage == 0
    kv.check_integrity([])


def test_a_reset_also_disowns_what_is_being_computed(kv: KVCacheManager) -> None:
    tokens = list(range(12))
    table, _ = admit(kv, tokens)
    kv.commit(table, tokens, 8)
    assert kv.reset_prefix_cache() == 2
    kv.commit(table, tokens, 12)
    kv.check_integrity([table])
    kv.free(table)
    assert matched(kv, BlockTable(), tokens) == []
    kv.free(compute(kv, tokens[:8]))
    assert len(matched(kv, BlockTable(), [*tokens, 1])) == 2, "the third is from before the reset"


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVCacheManager(8, 4, enable_prefix_caching=False)
    tokens = list(range(9))
    table, _ = admit(kv, tokens)
    assert len(tokens) < table.next_commit
    kv.free(table)
    assert matched(kv, BlockTable(), tokens) == []
