"""Draft tokens from earlier occurrences of the last tokens."""

import pytest

from engine.scheduler.speculation import NgramIndex


def searched(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """Return what follows the longest, then the newest match; at the end it repeats itself."""
    for length in range(longest, shortest - 1, -1):
        ending = tokens[len(tokens) - length :]
        for at in range(len(tokens) - 1, length - 1, -1):
            if tokens[at - length : at] == ending:
                period = tokens[at:]
                return [period[i % len(period)] for i in range(count)]
    return []


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 2), (2, 4), (3, 3)])
def test_index_finds_the_same_as_a_full_search(shortest: int, longest: int) -> None:
    tokens: list[int] = []
    index = NgramIndex(shortest, longest)
    for position in range(300):
        tokens.append((position * 7 + position * position // 5) % 5)
        assert index.propose(tokens, 7) == searched(tokens, shortest, longest, 7), position
        if position % 40 == 0:
            assert NgramIndex(shortest, longest).propose(tokens, 7) == index.propose(tokens, 7)
