"""How full KV blocks are named: the same in every process and on every machine.

A block's name is a pure function of the sequence's root, its tokens from position 0 on and what
these show. Engines find prefixes by it, front ends know by it which engine holds them.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import pack
from typing import Protocol

from engine.shared.messages import ROOT_SIZE

ROOT_DIGEST = bytes(ROOT_SIZE)
"""Parent of the first block of every sequence that has no root of its own."""

SHORT_NAME = 8
"""Bytes of a name by which front ends follow a block: two blocks of one name cost a cache miss."""


class Shown(Protocol):
    """Tokens of a sequence that stand for an image."""

    @property
    def position(self) -> int:
        """Index of the first of them."""
        ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """Names what was encoded."""
        ...


def block_digest(parent: bytes, token_ids: Sequence[int], shown: Sequence[bytes] = ()) -> bytes:
    """Return the 16-byte name of a full block after the prefix that `parent` names.

    Token ids have to fit in an int32.
    """
    tokens = pack(f"<{len(token_ids)}i", *token_ids)
    return blake2b(b"".join((parent, tokens, *shown)), digest_size=16).digest()


def short_name(digest: bytes) -> bytes:
    """Return what front ends know a block by."""
    return digest[:SHORT_NAME]


def shown_in(images: Iterable[Shown], start: int, end: int) -> list[bytes]:
    """Return what the tokens from `start` to `end` show: which images, and which part of each.

    That is an image's digest, and how many of its tokens come before `start` (or, if negative, of
    the others from there before it), in 8 bytes.
    """
    return [
        image.digest + pack("<q", start - image.position)
        for image in images
        if image.position < end and start < image.position + image.num_tokens
    ]


def adapter_root(root: bytes, adapter: str) -> bytes:
    """Return the root of sequences that are computed with a version of an adapter."""
    if not adapter:
        return root
    return blake2b(
        root + adapter.encode(), digest_size=ROOT_SIZE, person=b"swell adapters"
    ).digest()
