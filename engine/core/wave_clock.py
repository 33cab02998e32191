"""Which wave an engine is in."""

from engine.shared.messages import StartDpWave


class WaveClock:
    """The wave of an engine that steps alone, for its stats: what the coordinator says.

    `engine.lockstep.wave.EngineWave` is that of an engine in a group.
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
        """A request stamped with its front end's wave has come."""

    def start_ordered(self, order: StartDpWave) -> None:
        """The coordinator orders paused engines to run."""
        self.wave = max(self.wave, order.wave)

    def welcomed(self, wave: int) -> None:
        """A coordinator that the engine registered with (again) knows of `wave`."""
        self.wave = max(self.wave, wave)
