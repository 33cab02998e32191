"""What the receiver puts into the inbox of an engine's loop."""

from dataclasses import dataclass

from engine.core.events import CoreEvent
from engine.shared.messages import FormGroup


@dataclass(frozen=True)
class Welcomed:
    """The engine is a member and knows its rank."""

    rank: int
    wave: int


@dataclass(frozen=True)
class Drain:
    """The engine has to finish what it has, then end."""


@dataclass(frozen=True)
class Stop:
    """The engine has to end, for this reason if it is an error."""

    error: str | None = None


InboxItem = CoreEvent | Welcomed | FormGroup | Drain | Stop
