"""Messages of supervisors: with their children, with front ends, with the coordinator."""

import msgspec

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


# -- supervisors of several nodes <-> coordinator -------------------------------------------------

# They share the registration socket with the members. A supervisor repeats its report, and each is
# answered with an order, so that losing either only costs time.


class NodeEngines(msgspec.Struct, frozen=True, array_like=True):
    """The engines of one node as its supervisor sees them."""

    name: str
    target: int
    """How many there shall be."""
    capacity: int
    """How many there can be; 0 on a node that was told to run none."""
    phases: dict[str, str]
    """Of each engine by its number on the node: "ready", "retiring", or what it does to start."""
    busy: bool
    """Whether engines are being added, retired or replaced."""
    error: str | None = None
    """Why the last change was not carried out."""


class ScaleWish(msgspec.Struct, frozen=True, array_like=True):
    """What an operator asked one of the supervisors for."""

    number: int
    """Random, so that a repeated wish is told from a new one; not 0."""
    size: int | None
    """Run so many engines in all; None: replace every engine, node by node."""


class NodeReport(Message, frozen=True):
    """A supervisor says what its node runs; repeated as its heartbeat."""

    incarnation: int
    engines: NodeEngines
    assigned: int
    """Number of the newest assignment that it has taken."""
    wish: ScaleWish | None = None
    """Repeated until an order says that it was heard."""
    leaving: bool = False
    protocol: int = 0
    version: str = ""
    group: str = ""
    """The engine group of the node's engines."""


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """What one node has to do."""

    number: int
    """Grows with every decision; a node takes each once and none that is older."""
    target: int
    """Run so many engines."""
    restart: bool = False
    """Replace each of them."""


class NodeOrder(Message, frozen=True):
    """The coordinator's answer to a report."""

    nodes: list[NodeEngines]
    """All nodes, in the order in which they came."""
    you: int
    """Index of the node that this is sent to."""
    busy: bool
    """Whether a node has not yet done what it was assigned."""
    assignment: Assignment | None = None
    """What this node has not confirmed yet."""
    heard: int = 0
    """Number of this node's newest wish that all nodes have carried out, or that is impossible."""
    error: str | None = None
    """Why that wish is impossible."""


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
