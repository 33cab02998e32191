import pytest

from engine.scheduler.block_pool import BlockPool


@pytest.fixture
def evicted() -> list[int]:
    return []


@pytest.fixture
def pool(evicted: list[int]) -> BlockPool:
    return BlockPool(4, on_evict=evicted.append)


def take(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_cached_blocks_are_allocated_last_in_order_of_release(
    pool: BlockPool, evicted: list[int]
) -> None:
    a, b, c, d = take(pool, 4)
    pool.mark_cached(a)
    pool.mark_cached(b)
    pool.release([b])
    pool.release([a, c, d])
    assert set(take(pool, 2)) == {c, d}
    assert evicted == []
    assert take(pool, 2) == [b, a]
    assert evicted == [b, a]
    assert pool.cached_blocks() == set()


def test_reused_cached_block_is_not_evicted(pool: BlockPool, evicted: list[int]) -> None:
    a, b = take(pool, 2)
    pool.mark_cached(a)
    pool.release([a, b])
    assert pool.count_free([a, b]) == 2
    pool.acquire([a])
    assert pool.count_free([a, b]) == 1
    assert a not in take(pool, 3)
    assert pool.allocate(1) is None
    assert evicted == []


def test_blocks_with_forgotten_contents_are_free(pool: BlockPool, evicted: list[int]) -> None:
    a, b = take(pool, 2)
    pool.mark_cached(a)
    pool.mark_cached(b)
    pool.release([a])
    pool.forget_contents()
    pool.release([b])
    take(pool, 4)
    assert evicted == []


def test_the_integrity_check_finds_a_leak_and_a_double_release(pool: BlockPool) -> None:
    blocks = take(pool, 1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])
    pool.release(blocks)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])
