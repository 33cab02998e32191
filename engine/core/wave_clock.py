"""Which wave an engine is in."""

from dataclasses import dataclass
from typing import Protocol


class WaveClock(Protocol):
    """Which wave an engine is in, for its stats: that of its group, or its own count."""

    wave: int
    topology: int
    hold_epoch: int

    @property
    def running(self) -> bool:
        """Whether the engine steps in `wave` together with its group."""
        ...


@dataclass
class OwnClock:
    """The clock of an engine that steps alone: it only repeats what it hears."""

    wave: int = 0
    topology: int = 0
    hold_epoch: int = 0
    running: bool = False
