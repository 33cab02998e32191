"""What operators may look at and do while an engine serves."""

from engine.core.halting import Halting
from engine.core.held_adapters import HeldAdapters
from engine.core.load_reports import LoadReports
from engine.core.profiles import Profiles
from engine.core.steps import Steps
from engine.executor.interface import Executor
from engine.scheduler.scheduler import Scheduler
from engine.shared.messages import EngineSetup, EngineStats


class Operations:
    """Carries out operators' calls on one engine; `utilities` says which there are."""

    def __init__(
        self,
        setup: EngineSetup,
        *,
        halting: Halting,
        reports: LoadReports,
        steps: Steps,
        scheduler: Scheduler,
        executor: Executor,
        adapters: HeldAdapters,
        profiles: Profiles,
    ) -> None:
        self.setup = setup
        self.halting = halting
        self.profiles = profiles
        self.adapters = adapters
        self.vocab_size = executor.info.vocab_size
        self._reports = reports
        self._steps = steps
        self._scheduler = scheduler
        self._executor = executor

    def stats(self) -> EngineStats:
        """Return load and counters as of now, newer than all stats returned before."""
        return self._reports.stats()

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes and return how many blocks they had."""
        return self._scheduler.reset_prefix_cache()

    def sleep(self, level: int, *, hand_over: bool = False) -> None:
        """Give the executor's memory back; all requests wait and will be computed again.

        Level 1 keeps the weights where they are quick to have again, level 2 does not.
        With `hand_over` requests go to other engines as soon as one can take them.

        Raises:
            CannotDo: a step that its group gave up has to be taken again first.
            StepFailed: a step in flight failed; the engine cannot go on.
        """
        self._steps.vacate()
        self.halting.sleep(level, hand_over=hand_over)
        self._executor.sleep(level)

    def wake_up(self) -> None:
        """End a sleep.

        Raises:
            Exception: the executor cannot; the engine sleeps on.
        """
        self._executor.wake_up()
        self.halting.wake_up()
