"""Messages between engines about KV blocks.

Blocks are named as in `engine.kv.tiers`: the layer group in one byte, then the digest of all tokens
up to the block's end.
"""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.kv.block_store import MODEL_SIZE
from engine.kv.tiers import BlockName
from engine.shared.messages.wire import Message

MAX_NAMES = 64
"""Maximum blocks per request message."""
DIGEST_SIZE = 16
_NAME_SIZE = 17

Name = Annotated[bytes, Meta(min_length=_NAME_SIZE, max_length=_NAME_SIZE)]


class BlocksWanted(Message, frozen=True):
    """Request the contents of these blocks, in order, up to the first missing one."""

    incarnation: int
    """Incarnation of the addressed engine; any other one has none of the blocks."""
    model: Annotated[bytes, Meta(min_length=MODEL_SIZE, max_length=MODEL_SIZE)]
    """Key prefix of the blocks: weights, block format and version."""
    pull: int
    """Pull id, echoed with each block."""
    names: Annotated[list[Name], Meta(max_length=MAX_NAMES)]


class BlockFound(Message, frozen=True):
    """A block, whose content is in the next frame. An empty digest means that it is missing."""

    pull: int
    name: Name
    digest: bytes = b""
    """Checksum of key and content; see `checksum`."""


MAX_REQUEST = 64 + MAX_NAMES * (_NAME_SIZE + 8)
"""Maximum bytes of an encoded `BlocksWanted`."""

decode_wanted = msgspec.msgpack.Decoder(BlocksWanted).decode
decode_found = msgspec.msgpack.Decoder(BlockFound).decode


def pack(name: BlockName) -> bytes:
    """Encode a block name for messages."""
    group, digest = name
    return bytes([group]) + digest


def unpack(name: bytes) -> BlockName:
    """Decode a block name; inverse of `pack`."""
    return name[0], name[1:]


def checksum(key: bytes, content: bytes) -> bytes:
    """Return the checksum that authenticates a block and detects damage."""
    digest = blake2b(key, digest_size=DIGEST_SIZE)
    digest.update(content)
    return digest.digest()
