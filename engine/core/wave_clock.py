"""The wave of an independent engine."""

from engine.shared.messages import StartDpWave


class WaveClock:
    """The wave of an independent engine, for its stats: the newest that the coordinator sent.

    `engine.lockstep.wave.EngineWave` is its counterpart in a group.
    """

    topology = 0
    hold_epoch = 0

    def __init__(self, wave: int = 0) -> None:
        self.wave = wave

    @property
    def running(self) -> bool:
        """Whether the engine steps in `wave` together with its group."""
        return False

    def request_received(self, wave: int) -> None:
        """Handle a request stamped with its front end's wave."""

    def start_ordered(self, order: StartDpWave) -> None:
        """Handle the coordinator's order to wake paused engines."""
        self.wave = max(self.wave, order.wave)

    def welcomed(self, wave: int) -> None:
        """Adopt the wave that a coordinator sent upon registration."""
        self.wave = max(self.wave, wave)
