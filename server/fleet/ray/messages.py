"""Messages between a supervisor and its actors on other nodes.

It crosses Ray's own connections as bytes: method calls go straight from one process to the other,
so nothing of it is kept in the cluster's state or in an object store.
"""

from engine.shared.config import BUNDLED_MODEL, EngineConfig
from engine.shared.messages import ChildFailed, ChildProgress, ChildReady
from engine.shared.messages.wire import Message
from server.config import FrontEndConfig


class ActorLaunch(Message, frozen=True, kw_only=True):
    """What an actor has to start: an engine or an API server."""

    name: str
    engine: EngineConfig | None = None
    api_server: FrontEndConfig | None = None
    incarnation: int
    environment: dict[str, str]
    cluster_key: bytes | None
    """The cluster's shared secret; None where plain TCP is allowed."""
    node: str
    """The node's name, which is what others there are told by: Ray's, its address."""
    bundled_model: str = str(BUNDLED_MODEL)
    """Path of the bundled model on the supervisor's node; other nodes may have another."""


class Line(Message, frozen=True):
    """The program has printed a line."""

    text: str


class Exited(Message, frozen=True):
    """The program has ended; an actor's last event."""

    code: int


ActorEvent = ChildProgress | ChildReady | ChildFailed | Line | Exited


MAX_WAITING_LINES = 10_000
"""Lines that an actor keeps for a supervisor that does not listen; later ones are dropped."""
