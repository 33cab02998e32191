"""Messages between a supervisor and its actors on other nodes.

They travel as bytes in Ray's method calls, which go directly from process to process, so nothing is
stored in the cluster's state or an object store.
"""

from engine.shared.config import BUNDLED_MODEL, EngineConfig
from engine.shared.messages import ChildFailed, ChildProgress, ChildReady
from engine.shared.messages.wire import Message
from server.config import FrontEndConfig


class ActorLaunch(Message, frozen=True, kw_only=True):
    """A program for an actor to start: an engine or an API server."""

    name: str
    engine: EngineConfig | None = None
    api_server: FrontEndConfig | None = None
    incarnation: int
    environment: dict[str, str]
    cluster_key: bytes | None
    """The cluster's shared secret; None if plain TCP is allowed."""
    node: str
    """The node's name in this cluster: its address in Ray."""
    bundled_model: str = str(BUNDLED_MODEL)
    """Path of the bundled model on the supervisor's node; other nodes may differ."""


class Line(Message, frozen=True):
    """A line of the program's output."""

    text: str


class Exited(Message, frozen=True):
    """The program has exited; an actor's last event."""

    code: int


ActorEvent = ChildProgress | ChildReady | ChildFailed | Line | Exited


MAX_WAITING_LINES = 10_000
"""Maximum lines buffered for a supervisor that does not poll; later ones are dropped."""
