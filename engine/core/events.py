"""What an engine's core is told."""

from dataclasses import dataclass

from engine.shared.messages import CoreInput, HoldAdapters, StartDpWave


@dataclass(frozen=True)
class FrontEndJoined:
    """A front end is connected; its requests may follow. A new incarnation replaces the old one."""

    index: int
    incarnation: int


@dataclass(frozen=True)
class FrontEndLeft:
    """A front end has gone; nobody waits for its requests any more."""

    index: int


@dataclass(frozen=True)
class Rejoined:
    """A restarted coordinator knows the engine again, and of this wave."""

    wave: int


@dataclass(frozen=True)
class GrammarsSettled:
    """Grammars have been compiled, or could not be, since the message before."""


@dataclass(frozen=True)
class AdaptersSettled:
    """Adapters have been read, or could not be, since the message before."""


CoreEvent = (
    CoreInput | FrontEndJoined | FrontEndLeft | GrammarsSettled | AdaptersSettled | StartDpWave
    | HoldAdapters | Rejoined
)  # fmt: skip
