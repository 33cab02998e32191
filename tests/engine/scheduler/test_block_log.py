"""Numbered changes of the cached blocks, and full snapshots for late readers."""

from engine.scheduler.prefix_cache import BlockChanges, BlockLog
from engine.shared.messages import ALL_BLOCKS


def digest(number: int) -> bytes:
    return bytes([number]) * 16


def names(*numbers: int) -> bytes:
    return b"".join(digest(number)[:8] for number in numbers)


def test_the_first_query_gets_all_names_and_later_ones_the_changes() -> None:
    there = [digest(1), digest(2)]
    log = BlockLog(there)
    assert log.since(ALL_BLOCKS) == BlockChanges(ALL_BLOCKS, 0, names(1, 2), b"")
    assert log.since(0) is None
    log.changed(digest(3), is_stored=True)
    log.changed(digest(1), is_stored=False)
    assert log.since(0) == BlockChanges(0, 2, names(3), names(1))
    assert log.since(1) == BlockChanges(1, 2, b"", names(1))
    assert log.since(2) is None


def test_last_change_of_a_block_counts() -> None:
    log = BlockLog([])
    for _ in range(2):
        log.changed(digest(1), is_stored=True)
        log.changed(digest(1), is_stored=False)
    log.changed(digest(2), is_stored=False)
    log.changed(digest(2), is_stored=True)
    assert log.since(0) == BlockChanges(0, 6, names(2), names(1))


def test_outdated_or_impossible_queries_get_all_names() -> None:
    there = [digest(9)]
    log = BlockLog(there, max_changes=2)
    for number in range(3):
        log.changed(digest(number), is_stored=True)
    everything = BlockChanges(ALL_BLOCKS, 3, names(9), b"")
    assert log.since(0) == everything
    assert log.since(4) == everything
    assert log.since(1) == BlockChanges(1, 3, names(2, 1), b"")


def test_after_a_reset_all_names_are_sent() -> None:
    there = [digest(1)]
    log = BlockLog(there)
    there.clear()
    log.cleared()
    assert log.since(0) == BlockChanges(ALL_BLOCKS, 1, b"", b"")
    assert log.since(1) is None
