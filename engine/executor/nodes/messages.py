"""Messages between an engine's leader and the other nodes that it spans. No torch.

A node joins with what it was started with. The leader answers with the start of a session, in which
what the sockets of the node's workers carry travels in pieces. A session ends with the leader, with
any of the node's workers, or when either side hears nothing of the other.
"""

from typing import Literal

import msgspec

LARGEST_PIECE = 1 << 18
LARGEST_MESSAGE = 1 << 20
"""Bytes of any message: room for a piece, or for what a node has to agree on."""

Channel = Literal["lifeline", "commands"]
"""Which of a worker's two sockets."""


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This node is ready to start its workers; repeated until there is an answer."""

    version: str
    node: int
    agreement: dict[str, str]
    """What has to be equal on all nodes, by the names of settings."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The node cannot join, for this reason."""

    reason: str
    final: bool
    """Whether it would be refused again."""


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start the node's workers."""

    session: int
    """A random number, which all that belongs to it carries."""
    engine: int
    """The engine's rank."""
    address: str
    """HOST:PORT where the engine's processes meet."""


class Piece(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The next bytes of one of a worker's sockets; none: it has been closed."""

    session: int
    rank: int
    channel: Channel
    data: bytes


class Alive(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Whoever sends it is there."""

    session: int
    patience: float = 0.0
    """Seconds of the leader's silence after which a node gives it up; nodes leave this out."""


class Over(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The session has ended, for this reason."""

    session: int
    reason: str


FromLeader = Refused | Start | Piece | Alive | Over
FromNode = Join | Piece | Alive | Over
