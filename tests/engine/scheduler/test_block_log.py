"""Numbered changes of the cached blocks, and full snapshots for late readers."""

from engine.scheduler.prefix_cache import BlockChanges, BlockLog
from engine.shared.messages import ALL_BLOCKS


def digest(number: int) -> bytes:
    return bytes([number]) * 16


def names(*numbers: int) -> bytes:
    return b"".join(digest(number)[:8] for number in numbers)


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
