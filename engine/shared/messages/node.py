"""Messages within one node: between a supervisor and its children, and with front ends."""

from engine.shared.messages.placement import NodeEngines
from engine.shared.messages.wire import Message

# -- supervisor <-> its children (local socket pair) ---------------------------------------------


class ChildProgress(Message, frozen=True):
    """What a starting child is doing now, for the progress display."""

    phase: str
    waits_for: str = ""
    """Names of the cluster's resources for which it waits, e.g. `CPU, GPU`."""


class ChildReady(Message, frozen=True):
    """The child serves. `detail` is one line for people."""

    detail: str
    addresses: dict[str, str] = {}


class ChildFailed(Message, frozen=True):
    """The child cannot start, and starting it again would not help."""

    reason: str


class ChildTurn(Message, frozen=True):
    """The child's main loop turns; repeated every second from when it begins to serve."""


ChildStatus = ChildProgress | ChildReady | ChildFailed | ChildTurn


# -- front end <-> supervisor (control socket of one node) -----------------------------------------


class ScaleEngines(Message, frozen=True):
    """Run so many engines from now on."""

    data_parallel_size: int


class RestartEngines(Message, frozen=True):
    """Replace every engine, one after the other."""


class ControlQuery(Message, frozen=True):
    """Ask for the present state only."""


ControlRequest = ScaleEngines | RestartEngines | ControlQuery


class ControlStatus(Message, frozen=True):
    """The engines as the node's supervisor sees them; the answer to every request."""

    data_parallel_size: int
    """How many engines there shall be."""
    engines: dict[str, str]
    """Phase of each engine: "ready", "retiring", or what it does while it starts.

    By rank, or, where other nodes can join, as NODE/NUMBER of all nodes.
    """
    busy: bool
    """Whether engines are being added, retired or replaced."""
    error: str | None = None
    """Why the last change was not carried out."""
    nodes: list[NodeEngines] = []
    """Every node; empty where no other can join."""
    hosts: dict[str, str] = {}
    """The node of each engine that runs on another than the supervisor's; keys as in `engines`."""
    waiting: dict[str, str] = {}
    """The resources for which an engine waits, as of `ChildProgress`; keys as in `engines`."""
    api_servers: dict[str, str] = {}
    """Phase of each API server by name, where they are on several nodes."""
