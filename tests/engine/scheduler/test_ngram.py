"""Draft tokens from earlier occurrences of the last tokens."""

from engine.scheduler.speculation import NgramIndex


def test_continuation_of_last_tokens_is_proposed() -> None:
    index = NgramIndex(2, 4)
    assert index.propose([1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]


def test_nothing_is_proposed_after_tokens_that_are_new() -> None:
    index = NgramIndex(2, 4)
    assert index.propose([1], 3) == []
    assert index.propose([1, 2], 3) == []
    assert index.propose([1, 2, 3, 2], 3) == []


def test_longest_then_newest_match_is_proposed() -> None:
    tokens = [7, 1, 2, 30, 8, 1, 2, 40, 9, 1, 2, 50, 7, 1, 2]
    assert NgramIndex(2, 4).propose(tokens, 1) == [30]
    assert NgramIndex(2, 2).propose(tokens, 1) == [50]


def test_a_continuation_that_reaches_the_end_repeats_itself() -> None:
    assert NgramIndex(2, 4).propose([5, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert NgramIndex(1, 4).propose([6, 6], 3) == [6, 6, 6]


def test_tokens_are_entered_once_as_the_sequence_grows() -> None:
    grown, tokens = NgramIndex(2, 3), []
    for position in range(400):
        tokens.append((position * position) % 11)
        fresh = NgramIndex(2, 3)
        assert grown.propose(tokens, 4) == fresh.propose(tokens, 4), position


def test_index_finds_the_same_as_a_full_search() -> None:
    tokens: list[int] = []
    index = NgramIndex(3, 3)
    for position in range(500):
        tokens.append((position * 7 + position * position // 5) % 5)
        found = [
            at for at in range(3, len(tokens)) if tokens[at - 3 : at] == tokens[len(tokens) - 3 :]
        ]
        proposed = index.propose(tokens, 1)
        assert proposed == ([tokens[found[-1]]] if found else []), position
