"""Which block holds the keys and values of which token prefix."""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
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

    The beams of a search come anew with every token of theirs, choices share their prompt, and a
    conversation goes on where it was: only what is new of them has to be hashed.

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


class PrefixCache:
    """Full blocks by the digest of all tokens up to their end."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._block_of

    def blocks(self) -> Collection[int]:
        """Return the blocks whose content has a name."""
        return self._digest_of.keys()

    def digests(self) -> Collection[bytes]:
        """Return their names."""
        return self._block_of.keys()

    def get(self, digest: bytes) -> int | None:
        """Return the block with this content, if there is one."""
        return self._block_of.get(digest)

    def insert(self, digest: bytes, block_id: int) -> bool:
        """Name a block's content; False when another block has the same content already."""
        if digest in self._block_of:
            return False
        self._block_of[digest] = block_id
        self._digest_of[block_id] = digest
        return True

    def evict(self, block_id: int) -> bytes:
        """Forget a block whose content is about to be overwritten; return its name."""
        digest = self._digest_of.pop(block_id)
        del self._block_of[digest]
        return digest

    def clear(self) -> None:
        """Forget all blocks."""
        self._block_of.clear()
        self._digest_of.clear()

    def check_integrity(self, kept_blocks: set[int]) -> None:
        """Compare with the blocks whose content the pool keeps.

        Raises:
            AssertionError: the two disagree.
        """
        assert set(self._digest_of) == kept_blocks, "named blocks differ from the kept blocks"
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of
