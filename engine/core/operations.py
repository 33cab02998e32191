"""What operators may look at and do while an engine serves."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.batch.executor import CannotDo, Executor
from engine.core.extensions import Extensions
from engine.core.front_ends import FrontEnds
from engine.core.halting import Halting
from engine.core.held_adapters import HeldAdapters
from engine.core.steps import Steps
from engine.scheduler.scheduler import Scheduler
from engine.shared.messages import (
    ASLEEP_TAGS,
    PUSHED,
    EngineSetup,
    EngineStats,
    PauseMode,
    SleepMode,
    WeightsSource,
)
from engine.shared.writable import writable_directory

if TYPE_CHECKING:
    from engine.batch.weight_transfer import WeightTransfer

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")


class Operations:
    """Carries out operators' calls on one engine; `utilities` says which there are."""

    def __init__(
        self,
        setup: EngineSetup,
        *,
        halting: Halting,
        stats: Callable[[], EngineStats],
        steps: Steps,
        scheduler: Scheduler,
        executor: Executor,
        adapters: HeldAdapters,
        front_ends: FrontEnds,
        weights: WeightsSource,
        weights_dir: str | None,
        is_divided: bool,
        on_setup: Callable[[EngineSetup], None],
        profiler_dir: str | None,
        name: str,
        extensions: Extensions,
    ) -> None:
        """Wire the owners; `name` tells the engine's recordings in `profiler_dir` from others'."""
        self.setup = setup
        self.halting = halting
        self.stats = stats
        """Returns load and counters as of now, newer than all stats returned before."""
        self.extensions = extensions
        self.adapters = adapters
        self.vocab_size = executor.info.vocab_size
        self._steps = steps
        self._scheduler = scheduler
        self._executor = executor
        self._front_ends = front_ends
        self._profiler_dir = profiler_dir
        self._name = name
        self.weights = weights
        """What the engine computes with."""
        self.weight_updates = 0
        """How often they have been replaced."""
        self._kept: WeightsSource | None = None
        """What it computed with before, while that is there."""
        self._own_weights = weights
        self._weights_dir = weights_dir
        self._is_divided = is_divided
        self._on_setup = on_setup

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes and return how many blocks they had."""
        return self._scheduler.reset_prefix_cache(tiers=True)

    def reset_encoder_cache(self) -> int:
        """Forget encoded images but those that are being computed, and return how many."""
        return self._scheduler.reset_encoder_cache()

    @property
    def is_paused(self) -> bool:
        """Whether nothing runs until `resume`."""
        return self.halting.is_paused or not (self._scheduler.admits or self._scheduler.runs_any)

    def pause(self, mode: PauseMode) -> None:
        """Launch no step, or with `wait` no request: the pause begins when those that run end."""
        if mode == "wait":
            self._scheduler.admits = False
            return
        if mode == "abort":
            self._front_ends.collect(self._scheduler.abort_all())
        self.halting.pause(hand_over=mode == "move")

    def resume(self) -> None:
        """End a pause."""
        self._scheduler.admits = True
        self.halting.resume()

    def sleep(self, level: int, mode: SleepMode = "keep") -> None:
        """Give the executor's memory back; all requests wait and will be computed again.

        Level 0 gives nothing back, level 1 keeps the weights where they are quick to have again,
        level 2 does not. With `move` requests go to other engines as soon as one can take them,
        with `abort` they end.

        Raises:
            CannotDo: a step that its group gave up has to be taken again first, or nobody could
                load the weights again.
            StepFailed: a step in flight failed; the engine cannot go on.
        """
        if level > 1 and self.weights.model == PUSHED:
            raise CannotDo("weights that a trainer has sent cannot be read again: sleep at level 1")
        began = time.monotonic()
        if level:
            self._steps.vacate()
        if mode == "abort":
            self._front_ends.collect(self._scheduler.abort_all())
        self.halting.sleep(level, hand_over=mode == "move")
        if level:
            self._executor.sleep(level)
            self._scheduler.counters.count_sleep(time.monotonic() - began)

    def wake_up(self, tags: set[str] | None = None) -> None:
        """Have back what these tags name, by default everything; with the last of it a sleep ends.

        Raises:
            CannotDo: the KV cache needs the weights.
            Exception: the executor cannot; the engine sleeps on.
        """
        wanted = set(ASLEEP_TAGS) if tags is None else tags
        asleep = self.halting.asleep
        left = asleep - wanted
        if "weights" in left and "kv_cache" in asleep & wanted:
            raise CannotDo("the KV cache needs the weights: wake up weights first, or both")
        began = time.monotonic()
        if asleep & wanted or not asleep:
            self._executor.wake_up(kv_cache="kv_cache" not in left)
        if asleep & wanted:
            self._scheduler.counters.count_wake_up(time.monotonic() - began)
        self.halting.wake_up(wanted)

    def load_weights(self, source: WeightsSource, after: int) -> WeightsSource:
        """Compute with other weights from the next step on; return those before.

        They are read, or are what a trainer has sent, or are still there from before the last
        replacement. Only if they have been replaced as often as whoever asks has seen: of two who
        replace them at the same time one is refused.

        All requests go on from their tokens so far, which are computed again, and no cached prefix
        outlives its weights.

        Raises:
            CannotDo: they cannot be loaded; everything is as it was.
            StepFailed: a step in flight failed; the engine cannot go on.
        """
        if after != self.weight_updates:
            raise CannotDo("its weights were replaced meanwhile")
        if source == self._kept:
            self._steps.vacate()
            self._executor.settle_weights(back=True)
            return self._replaced(source, kept=None)
        if source.model == PUSHED:
            self._steps.vacate()
            self._executor.take_weights()
            return self._replaced(source, kept=self.weights)
        if self._is_divided:
            raise CannotDo(
                "weights are replaced in engines of one process only: start engines of "
                "--tensor-parallel-size, --pipeline-parallel-size and --enable-expert-parallel anew"
            )
        model, place = Path(source.model).expanduser().resolve(), self._weights_dir
        is_below = place is not None and model.is_relative_to(Path(place).expanduser().resolve())
        is_hub_id = HUB_ID.fullmatch(source.model) and not model.exists()
        if not (is_below or is_hub_id or source == self._own_weights):
            raise CannotDo(f"{source.model} is no hub id, and not below --weights-dir")
        self._steps.vacate()
        self._executor.load_weights(source.model, source.revision)
        if self.weights.model == PUSHED:
            return self._replaced(source, kept=self.weights)
        self._executor.settle_weights(back=False)  # they can be read again
        return self._replaced(source, kept=None)

    def settle_weights(self) -> None:
        """Free the weights before the last replacement, which were kept for the way back."""
        self._kept = None
        self._executor.settle_weights(back=False)

    @property
    def weight_transfer(self) -> "WeightTransfer":
        """What receives weights of a trainer; raises as the executor's."""
        return self._executor.weight_transfer()

    def _replaced(self, source: WeightsSource, kept: WeightsSource | None) -> WeightsSource:
        self._kept = kept
        before, self.weights = self.weights, source
        self.weight_updates += 1
        fingerprint = self._executor.info.model_fingerprint
        self.setup = replace(self.setup, model_fingerprint=fingerprint)
        self._on_setup(self.setup)
        self.halting.have_weights()
        return before

    def start_profile(self) -> str:
        """Begin to record what steps do; return the directory where the trace will be.

        Raises:
            CannotDo: there is no such directory, or nothing to record.
        """
        if self._profiler_dir is None:
            raise CannotDo("profiles need a place: start the engines with --torch-profiler-dir")
        writable_directory(self._profiler_dir)
        self._executor.start_profile()
        return self._profiler_dir

    def stop_profile(self) -> str:
        """End the recording and return the path of its trace.

        Raises:
            CannotDo: nothing is being recorded.
        """
        name = f"engine-{self._name}-step-{self._steps.count}.json.gz"
        path = Path(self._profiler_dir or "") / name
        self._executor.stop_profile(path)
        return str(path)
