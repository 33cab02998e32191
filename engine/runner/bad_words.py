"""Finds the tokens that would complete a sequence that must not be in an output."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class BadWords:
    """The words of one request, found by the tokens that come before their last.

    What a step costs depends on how many different lengths the words have that end alike, and not
    on how many words there are.
    """

    __slots__ = ("_alone", "_beginnings", "_lengths", "_longest")

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        """Index words; those whose last token is outside the vocabulary are left out."""
        found: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            if word and 0 <= word[-1] < vocab_size:
                found.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._alone = np.array(found.pop((), ()), np.int64)
        self._beginnings = {
            beginning: np.array(tokens, np.int64) for beginning, tokens in found.items()
        }
        """Last tokens by what comes before."""
        lengths: dict[int, set[int]] = {}
        for beginning in found:
            lengths.setdefault(beginning[-1], set()).add(len(beginning))
        self._lengths = {token: sorted(each) for token, each in lengths.items()}
        """Lengths of the beginnings that end with a token."""
        self._longest = max(map(len, found), default=0)

    def __bool__(self) -> bool:
        """Whether there are any words."""
        return bool(len(self._alone) or self._beginnings)

    def completing(self, output: npt.NDArray[np.int32]) -> IntArray:
        """Return the tokens that would complete a word after this output."""
        if not len(output) or (lengths := self._lengths.get(int(output[-1]))) is None:
            return self._alone
        newest = output[-self._longest :].tolist()
        found = [self._alone]
        for length in lengths:
            if length > len(newest):
                break
            tokens = self._beginnings.get(tuple(newest[-length:]))
            if tokens is not None:
                found.append(tokens)
        return np.concatenate(found) if len(found) > 1 else self._alone


NO_BAD_WORDS = BadWords((), 0)
