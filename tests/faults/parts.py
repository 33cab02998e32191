"""The production classes that a simulated cluster is made of; mutants replace one of them."""

from dataclasses import dataclass

from coordinator.state import CoordinatorState
from engine.core.engine_core import EngineCore
from engine.process.links import FrontEndLinks
from engine.process.reception import Reception
from engine.process.turns import Turns
from engine.shared.membership import Membership
from server.router.dispatch import Dispatcher
from server.router.state import ClusterState


@dataclass(frozen=True)
class Parts:
    """What decides in each kind of process."""

    coordinator: type[CoordinatorState] = CoordinatorState
    membership: type[Membership] = Membership
    core: type[EngineCore] = EngineCore
    links: type[FrontEndLinks] = FrontEndLinks
    reception: type[Reception] = Reception
    turns: type[Turns] = Turns
    cluster: type[ClusterState] = ClusterState
    dispatcher: type[Dispatcher] = Dispatcher


HEARTBEAT = 1.0
TIMEOUT = 3.0
"""Seconds of silence after which a member is taken for dead."""
STEP_TIMEOUT = 1.0
"""Seconds after which a step is taken for hung; five times that for an engine's first steps."""
DRAIN_TIMEOUT = 1000.0
"""Seconds after which a draining engine ends whatever it has: never within a run."""
