"""Names of the blocks of sequences that came before, for those that begin with the same tokens.

The beams of a search come anew with every token of theirs, choices share their prompt, and a
conversation goes on where it was: only what is new of them has to be hashed.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

MAX_KNOWN_TOKENS = 2**20
"""Tokens of all sequences that are remembered: some 8 MB with the names of their blocks."""

_WORTHWHILE = 2
"""Blocks that have to be hashed for a sequence before it is remembered."""


class _Known(NamedTuple):
    tokens: bytes
    """Those of all blocks, as machine integers: compared at once."""
    digests: list[bytes]


class KnownDigests:
    """Remembers one sequence for each first block, the one remembered last.

    Args:
        block_size: tokens of a block.
        max_tokens: of all sequences; who has not been asked for longest is forgotten first.
    """

    def __init__(self, block_size: int, max_tokens: int = MAX_KNOWN_TOKENS) -> None:
        self._block_size = block_size
        self._max_blocks = max_tokens // block_size
        self._num_blocks = 0
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """How many blocks are remembered."""
        return self._num_blocks

    def beginning(self, first: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """Return the digests of a sequence's first full blocks, as far as they are known.

        Args:
            first: digest of the first of them.
            token_ids: all tokens of the sequence.
        """
        known = self._known.get(first)
        if known is None:
            return [first]
        self._known.move_to_end(first)
        count = min(len(token_ids) // self._block_size, len(known.digests))
        tokens = _packed(token_ids[: count * self._block_size])
        return known.digests[: _common(tokens, known.tokens, count)]

    def remember(self, digests: Sequence[bytes], token_ids: Sequence[int], num_hashed: int) -> None:
        """Take the digests of a sequence, if enough of them had to be hashed for it."""
        count = len(digests)
        if num_hashed < _WORTHWHILE or count > self._max_blocks:
            return
        known = self._known.pop(digests[0], None)
        if known is not None:
            self._num_blocks -= len(known.digests)
        tokens = _packed(token_ids[: count * self._block_size])
        self._known[digests[0]] = _Known(tokens, list(digests))
        self._num_blocks += count
        while self._num_blocks > self._max_blocks:
            _, forgotten = self._known.popitem(last=False)
            self._num_blocks -= len(forgotten.digests)


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _common(tokens: bytes, others: bytes, count: int) -> int:
    """Return how many of the first `count` blocks are the same in both; the first is."""
    size = len(tokens) // count
    low, high = 1, count
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[low * size : middle * size] == others[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low
