"""What engines say to each other about KV blocks.

Blocks are named as in `engine.kv_tiers`: the number of the group of layers in one byte, and the
digest of all tokens up to the block's end.
"""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.kv_tiers.block_store import MODEL_SIZE
from engine.kv_tiers.tiers import BlockName
from engine.shared.messages.wire import Message

MAX_NAMES = 64
"""Blocks that one message asks for at most."""
DIGEST_SIZE = 16
_NAME_SIZE = 17

Name = Annotated[bytes, Meta(min_length=_NAME_SIZE, max_length=_NAME_SIZE)]


class BlocksWanted(Message, frozen=True):
    """Send the contents of these blocks, in this order, up to one that is not there."""

    incarnation: int
    """Of the engine that is asked: another one has nothing to do with it."""
    model: Annotated[bytes, Meta(min_length=MODEL_SIZE, max_length=MODEL_SIZE)]
    """What the blocks are of: weights, shape and type, and how they are computed."""
    pull: int
    """Comes back with each block."""
    names: Annotated[list[Name], Meta(max_length=MAX_NAMES)]


class BlockFound(Message, frozen=True):
    """A block, whose content is in the next frame. Without a digest it is not there."""

    pull: int
    name: Name
    digest: bytes = b""
    """Of key and content, see `checksum`."""


MAX_QUESTION = 64 + MAX_NAMES * (_NAME_SIZE + 8)
"""Bytes of an encoded `BlocksWanted`, at most."""

decode_wanted = msgspec.msgpack.Decoder(BlocksWanted).decode
decode_found = msgspec.msgpack.Decoder(BlockFound).decode


def pack(name: BlockName) -> bytes:
    """Return a name as messages have it."""
    group, digest = name
    return bytes([group]) + digest


def unpack(name: bytes) -> BlockName:
    """Return what `pack` made a name of."""
    return name[0], name[1:]


def checksum(key: bytes, content: bytes) -> bytes:
    """Return what tells a block from any other, and from one that is damaged."""
    digest = blake2b(key, digest_size=DIGEST_SIZE)
    digest.update(content)
    return digest.digest()
