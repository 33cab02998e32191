"""Bad words are matched without checking each of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.slots import NO_BAD_WORDS, BadWords
from tests.support.cpu_time import takes_less_than

TOKENS = st.integers(0, 3)
VOCAB = 4


def naive(words: list[tuple[int, ...]], output: list[int]) -> set[int]:
    found = set()
    for word in words:
        before = list(word[:-1])
        if word and (not before or output[-len(before) :] == before):
            found.add(word[-1])
    return found


@given(
    words=st.lists(st.lists(TOKENS, max_size=5).map(tuple), max_size=30),
    output=st.lists(TOKENS, max_size=12),
)
def test_tokens_that_complete_a_word_are_found(
    words: list[tuple[int, ...]], output: list[int]
) -> None:
    found = BadWords(words, VOCAB).completing(np.array(output, np.int32))
    assert set(found.tolist()) == naive(words, output)
    assert bool(BadWords(words, VOCAB)) == any(words)


def test_tokens_outside_the_vocabulary_are_ignored() -> None:
    assert not BadWords([(1, 9), (9,), ()], VOCAB)
    assert not NO_BAD_WORDS
    assert BadWords([(9, 1)], VOCAB).completing(np.array([9], np.int32)).tolist() == [1]


def test_many_bad_words_cost_as_much_as_one() -> None:
    output = np.full(300, 5, np.int32)
    words = BadWords([(7, token) for token in range(100_000)], 100_000)

    def steps() -> None:
        for _ in range(1000):
            words.completing(output)

    takes_less_than(1.0, steps)  # checking each word would take over a minute
