"""Shared prefixes of sequences are not hashed again."""

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler import kv_cache
from engine.scheduler.block_table import BlockTable
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.prefix_cache import KnownDigests
from engine.shared.block_names import ROOT_DIGEST, block_digest

SIZE = 4
LONG = list(range(1000, 1000 + 50 * SIZE))


def chain(token_ids: list[int], root: bytes = ROOT_DIGEST) -> list[bytes]:
    digests: list[bytes] = []
    for start in range(0, len(token_ids) // SIZE * SIZE, SIZE):
        parent = digests[-1] if digests else root
        digests.append(block_digest(parent, token_ids[start : start + SIZE]))
    return digests


def hashed_for(kv: KVCacheManager, token_ids: list[int], root: bytes = ROOT_DIGEST) -> int:
    """Compute and release a sequence; return the number of blocks hashed for it."""
    with patch.object(kv_cache, "block_digest", wraps=block_digest) as hashed:
        table = BlockTable(root)
        assert kv.try_admit(table, token_ids, use_cache=True, headroom=0) is not None
        kv.commit(table, token_ids, len(token_ids))
    assert table.digests == chain(token_ids, root)
    kv.free(table)
    return hashed.call_count


def test_only_new_part_of_a_beam_is_hashed() -> None:
    kv = KVCacheManager(200, SIZE, enable_prefix_caching=True)
    assert hashed_for(kv, [*LONG, 1]) == 50
    for beam in range(8):
        ending = [beam] * 2 * SIZE
        assert hashed_for(kv, [*LONG, *ending]) <= 1 + 2


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), max_size=6 * SIZE),
            st.sampled_from([ROOT_DIGEST, b"s" * 16]),
        ),
        max_size=12,
    )
)
def test_known_digests_equal_hashed_ones(
    sequences: list[tuple[list[int], bytes]],
) -> None:
    kv = KVCacheManager(8, SIZE, enable_prefix_caching=True)
    for token_ids, root in sequences:
        if token_ids:
            hashed_for(kv, token_ids, root)


def test_known_digests_are_bounded() -> None:
    known = KnownDigests(SIZE, max_tokens=100 * SIZE)
    for first in range(50):
        token_ids = [first] * 30 * SIZE
        known.remember(chain(token_ids), token_ids, 30)
        assert known.num_blocks <= 100
    newest, oldest = [49] * 30 * SIZE, [0] * 30 * SIZE
    assert known.beginning(chain(newest)[0], newest) == chain(newest)
    assert known.beginning(chain(oldest)[0], oldest) == chain(oldest)[:1]
    endless = [7] * 101 * SIZE
    known.remember(chain(endless), endless, 101)
    assert known.num_blocks <= 100
    assert known.beginning(chain(endless)[0], endless) == chain(endless)[:1]


def test_recently_used_digests_are_remembered_longest() -> None:
    known = KnownDigests(SIZE, max_tokens=100 * SIZE)
    often = [1] * 40 * SIZE
    known.remember(chain(often), often, 40)
    for first in range(2, 20):
        token_ids = [first] * 30 * SIZE
        known.remember(chain(token_ids), token_ids, 30)
        assert known.beginning(chain(often)[0], often) == chain(often)
