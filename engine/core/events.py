"""What an engine's core is told."""

from dataclasses import dataclass

from engine.shared.messages import CoreInput, FleetOrder, HoldAdapters, StartDpWave


@dataclass(frozen=True)
class FrontEndJoined:
    """A front end is connected; its requests may follow. A new incarnation replaces the old one."""

    index: int
    incarnation: int


@dataclass(frozen=True)
class FrontEndLeft:
    """A front end has gone: its requests are obsolete."""

    index: int


@dataclass(frozen=True)
class Rejoined:
    """A restarted coordinator knows the engine again, and of this wave."""

    wave: int


@dataclass(frozen=True)
class PrerequisitesSettled:
    """What requests wait for is there, or cannot be had: grammars, or KV blocks from a tier."""


@dataclass(frozen=True)
class AdaptersSettled:
    """Adapters have been read, or could not be, since the message before."""


CoreEvent = (
    CoreInput | FrontEndJoined | FrontEndLeft | PrerequisitesSettled | AdaptersSettled | StartDpWave
    | HoldAdapters | FleetOrder | Rejoined
)  # fmt: skip
