import pytest

from engine.scheduler.block_table import BlockTable
from engine.scheduler.kv_cache import KVCacheManager
from engine.shared.block_names import ROOT_DIGEST, block_digest


@pytest.fixture
def kv() -> KVCacheManager:
    return KVCacheManager(8, 4, enable_prefix_caching=True)


def admit(kv: KVCacheManager, token_ids: list[int]) -> tuple[BlockTable, int]:
    table = BlockTable()
    cached = kv.try_admit(table, token_ids, use_cache=True, headroom=0)
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


def test_matched_blocks_are_not_counted_as_free_for_the_rest(kv: KVCacheManager) -> None:
    tokens = list(range(16))
    kv.free(compute(kv, tokens))
    admit(kv, list(range(100, 116)))
    # Four free blocks, all of them cached: the prefix fits, but no fifth block beside it.
    table = BlockTable()
    assert kv.try_admit(table, [*tokens, 1], use_cache=True, headroom=0) is None
    assert table.held() == []
    assert admit(kv, tokens)[1] == 12
