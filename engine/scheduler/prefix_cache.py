"""Which block holds the keys and values of which token prefix."""

from collections.abc import Collection, Sequence
from hashlib import blake2b
from struct import pack

from engine.batch.batch import SlotImage
from engine.shared.messages import ROOT_SIZE

ROOT_DIGEST = bytes(ROOT_SIZE)
"""Parent of the first block of every sequence that has no root of its own."""


def block_digest(parent: bytes, token_ids: Sequence[int], shown: Sequence[bytes] = ()) -> bytes:
    """Return the 16-byte name of a full block after the prefix that `parent` names.

    A pure function of the sequence's root, its tokens from position 0 on and what these show: the
    same in every process and on every machine. Token ids have to fit in an int32.
    """
    tokens = pack(f"<{len(token_ids)}i", *token_ids)
    return blake2b(b"".join((parent, tokens, *shown)), digest_size=16).digest()


def shown_in(images: Sequence[SlotImage], start: int, end: int) -> list[bytes]:
    """Return what the tokens from `start` to `end` show: which images, and which part of each.

    That is an image's digest, and how many of its tokens come before `start` (or, if negative, of
    the others from there before it), in 8 bytes.
    """
    return [
        image.digest + pack("<q", start - image.position)
        for image in images
        if image.position < end and start < image.end
    ]


def adapter_root(root: bytes, adapter: str) -> bytes:
    """Return the root of sequences that are computed with a version of an adapter."""
    if not adapter:
        return root
    return blake2b(
        root + adapter.encode(), digest_size=ROOT_SIZE, person=b"swell adapters"
    ).digest()


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
