"""What an engine process hosts: our own core, or an engine of another make."""

from collections.abc import Callable
from typing import Protocol

from engine.core.events import CoreEvent
from engine.core.front_ends import CoreStep
from engine.core.wave_clock import WaveClock
from engine.shared.config import EngineConfig
from engine.shared.messages import EngineSetup, EngineStats


class HostedEngine(Protocol):
    """An engine without sockets or threads of its own for messages: events in, steps out.

    All calls come from the main thread of the process.
    """

    @property
    def setup(self) -> EngineSetup:
        """What the engine tells the coordinator when it is ready."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to send."""

    @property
    def has_requests(self) -> bool:
        """Whether a draining engine has to go on: requests, or answers that are not sent yet.

        Requests of an engine that is halted do not count.
        """

    @property
    def has_front_ends(self) -> bool:
        """Whether anybody is there who could send requests."""

    @property
    def next_tokens(self) -> int:
        """Maximum tokens that the next step can compute; bounds the time that it may take."""

    def stats(self) -> EngineStats:
        """Return load and counters as of now, newer than all stats returned before."""

    def handle(self, event: CoreEvent) -> None:
        """Take one event. An error in a message is reported to its sender only.

        Raises:
            StepFailed: a utility had to finish the steps in flight, and one failed.
        """

    def step(self) -> CoreStep:
        """Advance by a step and return everything there is to send.

        Raises:
            StepFailed: the engine cannot go on.
        """


class Backend(HostedEngine, Protocol):
    """An engine of another make."""

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
        """Load the model; until then nothing is sent to the engine.

        Args:
            on_failure: ends this process with a reason; may be called in any thread.

        Raises:
            ValueError: a setting cannot be served. None may be ignored.
        """

    def shutdown(self) -> None:
        """End all processes and threads, and give the memory back."""
