"""Interface of the engine in an engine process: Swell's core, or another implementation."""

from collections.abc import Callable
from typing import Protocol

from engine.core.events import CoreEvent
from engine.core.front_ends import CoreStep
from engine.core.wave_clock import WaveClock
from engine.shared.config import EngineConfig
from engine.shared.messages import EngineSetup, EngineStats


class HostedEngine(Protocol):
    """An engine without sockets or message threads: events in, steps out.

    All methods are called from the process's main thread.
    """

    @property
    def setup(self) -> EngineSetup:
        """Reported to the coordinator when the engine is ready."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to send."""

    @property
    def has_requests(self) -> bool:
        """Whether a draining engine has to continue: it has requests, or unsent answers.

        A halted engine's requests do not count.
        """

    @property
    def has_front_ends(self) -> bool:
        """Whether any connected front end could send requests."""

    @property
    def next_tokens(self) -> int:
        """Maximum tokens that the next step can compute; determines its time limit."""

    def stats(self) -> EngineStats:
        """Return current load and counters, with a version above all earlier ones."""

    def handle(self, event: CoreEvent) -> None:
        """Handle one event. Errors in a message are reported only to its sender.

        Raises:
            StepFailed: a utility had to finish the steps in flight, and one failed.
        """

    def step(self) -> CoreStep:
        """Advance by a step and return everything to send.

        Raises:
            StepFailed: the engine cannot continue.
        """


def missing_members(backend: object) -> list[str]:
    """Return the names of what an object lacks of a `Backend`."""
    wanted = {name for kind in (HostedEngine, Backend) for name in vars(kind)}
    return sorted({name for name in wanted if not name.startswith("_")} - {*dir(backend)})


class Backend(HostedEngine, Protocol):
    """An alternative engine implementation."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank: int,
        incarnation: int,
        clock: WaveClock,
        on_failure: Callable[[str], None],
        weight_version: str = "",
    ) -> None:
        """Load the model; no events arrive before.

        Args:
            on_failure: ends this process with a reason; callable from any thread.

        Raises:
            ValueError: a setting is not supported. Settings must not be ignored silently.
        """

    def shutdown(self) -> None:
        """Stop all processes and threads, and release the memory."""
