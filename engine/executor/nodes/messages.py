"""Messages between an engine's leader and the other nodes that it spans. No torch.

A node joins with its launch settings. The leader replies with the start of a session, in which the
data of the workers' sockets is sent in pieces. A session ends with the leader, with any of the
node's workers, or if one side sends nothing for too long.
"""

from typing import Literal

import msgspec

LARGEST_PIECE = 1 << 18
LARGEST_MESSAGE = 1 << 20
"""Maximum bytes of any message: a piece, or a node's agreement."""

Channel = Literal["lifeline", "commands"]
"""One of a worker's two sockets."""


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This node is ready to start its workers; repeated until answered."""

    version: str
    node: int
    agreement: dict[str, str]
    """Settings that must be equal on all nodes, by name."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The node cannot join, for the given reason."""

    reason: str
    final: bool
    """Whether retrying is pointless."""


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start the node's workers."""

    session: int
    """Random id, included in all messages of the session."""
    engine: int
    """The engine's rank."""
    address: str
    """HOST:PORT of the rendezvous of the engine's processes."""


class Piece(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The next bytes of one of a worker's sockets; empty if it has been closed."""

    session: int
    rank: int
    channel: Channel
    data: bytes


class Alive(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Heartbeat."""

    session: int
    patience: float = 0.0
    """Seconds without a message from the leader after which a node gives up; 0 from nodes."""


class Over(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The session has ended, for the given reason."""

    session: int
    reason: str


FromLeader = Refused | Start | Piece | Alive | Over
FromNode = Join | Piece | Alive | Over
