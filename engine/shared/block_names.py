"""Names of full KV blocks, identical in every process and on every machine.

A block's name is a pure function of the sequence's root, its tokens from position 0 on and the
images that they stand for. Engines look up prefixes by it; front ends track by it which engine
holds which block.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import pack
from typing import Protocol

from engine.shared.messages import ROOT_SIZE

ROOT_DIGEST = bytes(ROOT_SIZE)
"""Parent of the first block of every sequence without a root."""

SHORT_NAME = 8
"""Bytes of a name that front ends use to track a block: a collision costs only a cache miss."""


class Shown(Protocol):
    """The placeholder tokens of an image in a sequence."""

    @property
    def position(self) -> int:
        """Index of the first token."""
        ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """Digest of the encoded content."""
        ...


def block_digest(parent: bytes, token_ids: Sequence[int], shown: Sequence[bytes] = ()) -> bytes:
    """Return the 16-byte name of a full block that follows the prefix named `parent`.

    Token ids have to fit in an int32.
    """
    tokens = pack(f"<{len(token_ids)}i", *token_ids)
    return blake2b(b"".join((parent, tokens, *shown)), digest_size=16).digest()


def short_name(digest: bytes) -> bytes:
    """Return the prefix of a name by which front ends track a block."""
    return digest[:SHORT_NAME]


def shown_in(images: Iterable[Shown], start: int, end: int) -> list[bytes]:
    """Return which images, and which part of each, the tokens in [start, end) stand for.

    Each entry is an image's digest followed by `start` minus the image's position, as an 8-byte
    little-endian integer; negative if the image begins after `start`.
    """
    return [
        image.digest + pack("<q", start - image.position)
        for image in images
        if image.position < end and start < image.position + image.num_tokens
    ]


def adapter_root(root: bytes, adapter: str) -> bytes:
    """Return the root of sequences that use a version of an adapter."""
    if not adapter:
        return root
    return blake2b(
        root + adapter.encode(), digest_size=ROOT_SIZE, person=b"swell adapters"
    ).digest()
