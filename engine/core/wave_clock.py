"""Which wave an engine is in."""

from typing import Protocol

from engine.shared.messages import StartDpWave


class WaveClock(Protocol):
    """Which wave an engine is in, for its stats: that of its group, or its own count."""

    wave: int
    topology: int
    hold_epoch: int

    @property
    def running(self) -> bool:
        """Whether the engine steps in `wave` together with its group."""
        ...

    def request_received(self, wave: int) -> None:
        """A request stamped with its front end's wave has come."""
        ...

    def start_ordered(self, order: StartDpWave) -> None:
        """The coordinator orders paused engines to run."""
        ...

    def welcomed(self, wave: int) -> None:
        """A coordinator that the engine registered with again knows of `wave`."""
        ...


class OwnClock:
    """The clock of an engine that steps alone: it only repeats what the coordinator says."""

    topology = 0
    hold_epoch = 0
    running = False

    def __init__(self, wave: int = 0) -> None:
        self.wave = wave

    def request_received(self, wave: int) -> None:
        """Nothing follows: the stamp is the front end's view of what the coordinator says."""

    def start_ordered(self, order: StartDpWave) -> None:
        """Adopt a newer wave."""
        self.wave = max(self.wave, order.wave)

    def welcomed(self, wave: int) -> None:
        """Adopt a newer wave."""
        self.wave = max(self.wave, wave)
