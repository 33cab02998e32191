"""Messages of supervisors to and from their children, front ends and the coordinator."""

import msgspec

from engine.shared.messages.wire import Message

# -- supervisor <-> its children (local socket pair) ---------------------------------------------


class ChildProgress(Message, frozen=True):
    """The phase of a starting child, for the progress display."""

    phase: str
    waits_for: str = ""
    """Names of the cluster resources it waits for, e.g. `CPU, GPU`."""


class ChildReady(Message, frozen=True):
    """The child serves. `detail` is one line for display."""

    detail: str
    addresses: dict[str, str] = {}


class ChildFailed(Message, frozen=True):
    """The child cannot start, and restarting it would not help."""

    reason: str


class ChildHeartbeat(Message, frozen=True, tag="ChildTurn"):
    """The child's main loop makes progress; sent every second once it serves."""


ChildStatus = ChildProgress | ChildReady | ChildFailed | ChildHeartbeat


# -- supervisors of several nodes <-> coordinator -------------------------------------------------

# They share the registration socket with the members. A supervisor repeats its report, and each is
# answered with an order, so that losing either only costs time.


class NodeEngines(msgspec.Struct, frozen=True, array_like=True):
    """The engines of one node as its supervisor sees them."""

    name: str
    target: int
    """Number of engines requested."""
    capacity: int
    """Maximum number of engines; 0 if the node is configured to run none."""
    phases: dict[str, str]
    """Phase of each engine by its index on the node: "ready", "retiring", or its startup phase."""
    busy: bool
    """Whether engines are being added, retired or replaced."""
    error: str | None = None
    """Why the last change failed."""


class ScalingRequest(msgspec.Struct, frozen=True, array_like=True):
    """An operator's request to one of the supervisors."""

    number: int
    """Random and not 0, to recognize repetitions."""
    size: int | None
    """Total number of engines to run; None: replace every engine, node by node."""


class NodeReport(Message, frozen=True):
    """A supervisor's report of its node; repeated as its heartbeat."""

    incarnation: int
    engines: NodeEngines
    assigned: int
    """Number of the newest assignment applied."""
    request: ScalingRequest | None = None
    """Repeated until an order acknowledges it."""
    leaving: bool = False
    protocol: int = 0
    version: str = ""
    group: str = ""
    """Engine group of the node's engines."""


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """Orders of the coordinator to one node."""

    number: int
    """Grows with every decision; a node applies each once and ignores older ones."""
    target: int
    """Number of engines to run."""
    restart: bool = False
    """Replace every engine."""


class NodeOrder(Message, frozen=True):
    """The coordinator's answer to a report."""

    nodes: list[NodeEngines]
    """All nodes, in order of joining."""
    recipient: int
    """Index of the recipient in `nodes`."""
    busy: bool
    """Whether a node has not yet completed its assignment."""
    assignment: Assignment | None = None
    """Assignment that this node has not confirmed yet."""
    acknowledged: int = 0
    """Number of this node's newest request that is completed or impossible."""
    error: str | None = None
    """Why that request is impossible."""


# -- front end <-> supervisor (control socket of one node) -----------------------------------------


class ScaleEngines(Message, frozen=True):
    """Set the number of engines."""

    data_parallel_size: int


class RestartEngines(Message, frozen=True):
    """Replace every engine, one after the other."""


class ControlQuery(Message, frozen=True):
    """Request the current state only."""


ControlRequest = ScaleEngines | RestartEngines | ControlQuery


class ControlStatus(Message, frozen=True):
    """The engines as the node's supervisor sees them; the answer to every request."""

    data_parallel_size: int
    """Number of engines requested."""
    engines: dict[str, str]
    """Phase of each engine: "ready", "retiring", or its startup phase.

    By rank, or, where other nodes can join, as NODE/NUMBER of all nodes.
    """
    busy: bool
    """Whether engines are being added, retired or replaced."""
    error: str | None = None
    """Why the last change failed."""
    nodes: list[NodeEngines] = []
    """All nodes; empty where no other can join."""
    hosts: dict[str, str] = {}
    """Node of each engine that is not on the supervisor's node; keys as in `engines`."""
    waiting: dict[str, str] = {}
    """Resources that an engine waits for, as in `ChildProgress`; keys as in `engines`."""
    api_servers: dict[str, str] = {}
    """Phase of each API server by name, if they are on several nodes."""
