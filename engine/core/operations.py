"""What operators may look at and do while an engine serves."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from engine.batch.executor import CannotDo, Executor
from engine.core.extensions import Extensions
from engine.core.front_ends import FrontEnds
from engine.core.halting import FLEET, Halting
from engine.core.held_adapters import HeldAdapters
from engine.core.steps import Steps
from engine.scheduler.scheduler import Scheduler
from engine.shared.messages import (
    ASLEEP_TAGS,
    PUSHED,
    AddRequest,
    EngineSetup,
    EngineStats,
    PauseMode,
    PoolingParams,
    SamplingParams,
    SleepMode,
    WeightsSource,
)
from engine.shared.writable import writable_directory

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")


@dataclass(kw_only=True, eq=False)
class Operations:
    """Carries out operators' calls on one engine; `utilities` says which there are."""

    setup: EngineSetup
    halting: Halting
    stats: Callable[[], EngineStats]
    """Returns load and counters as of now, newer than all stats returned before."""
    steps: Steps
    scheduler: Scheduler
    executor: Executor
    adapters: HeldAdapters
    front_ends: FrontEnds
    weights: WeightsSource
    """What the engine computes with."""
    weights_dir: str | None
    is_divided: bool
    on_setup: Callable[[EngineSetup], None]
    profiler_dir: str | None
    name: str
    """Tells the engine's recordings in `profiler_dir` from others'."""
    extensions: Extensions

    def __post_init__(self) -> None:
        self.vocab_size = self.executor.info.vocab_size
        self.weight_updates = 0
        """How often the weights have been replaced."""
        self._kept: WeightsSource | None = None
        """What it computed with before, while that is there."""
        self._own_weights = self.weights

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes and return how many blocks they had."""
        return self.scheduler.reset_prefix_cache(tiers=True)

    @property
    def is_paused(self) -> bool:
        """Whether nothing runs until `resume`."""
        return self.halting.is_paused or not (self.scheduler.admits or self.scheduler.runs_any)

    def execute_dummy_batch(self) -> int:
        """Have a step of one token computed next, in a group by all of its engines, though nobody
        waits for the token; return how many steps were computed before.

        An engine with requests computes steps anyway, and gets none.

        Raises:
            CannotDo: it is paused or sleeps.
        """
        if self.is_paused or self.halting.is_halted:
            raise CannotDo("the engine is paused or sleeps: resume it, or wake it up, first")
        if not self.scheduler.has_work:
            pooling = PoolingParams() if self.executor.info.pools else None
            sampling = SamplingParams(max_tokens=1, seed=0)
            self.scheduler.add(
                AddRequest(-1, "dummy-batch", FLEET, 0, [0], sampling, pooling=pooling)
            )
        return self.steps.count

    def pause(self, mode: PauseMode) -> None:
        """Launch no step, or with `wait` no request: the pause begins when those that run end."""
        if mode == "wait":
            self.scheduler.admits = False
            return
        if mode == "abort":
            self.front_ends.collect(self.scheduler.abort_all())
        self.halting.pause(hand_over=mode == "move")

    def resume(self) -> None:
        """End a pause."""
        self.scheduler.admits = True
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
            self.steps.vacate()
        if mode == "abort":
            self.front_ends.collect(self.scheduler.abort_all())
        self.halting.sleep(level, hand_over=mode == "move")
        if level:
            self.executor.sleep(level)
            self.scheduler.counters.count_sleep(time.monotonic() - began)

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
            self.executor.wake_up(kv_cache="kv_cache" not in left)
        if asleep & wanted:
            self.scheduler.counters.count_wake_up(time.monotonic() - began)
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
            self.steps.vacate()
            self.executor.settle_weights(back=True)
            return self._replaced(source, kept=None)
        if source.model == PUSHED:
            self.steps.vacate()
            self.executor.take_weights()
            return self._replaced(source, kept=self.weights)
        if self.is_divided:
            raise CannotDo(
                "weights are replaced in engines of one process only: start engines of "
                "--tensor-parallel-size, --pipeline-parallel-size and --enable-expert-parallel anew"
            )
        model, place = Path(source.model).expanduser().resolve(), self.weights_dir
        is_below = place is not None and model.is_relative_to(Path(place).expanduser().resolve())
        is_hub_id = HUB_ID.fullmatch(source.model) and not model.exists()
        if not (is_below or is_hub_id or source == self._own_weights):
            raise CannotDo(f"{source.model} is no hub id, and not below --weights-dir")
        self.steps.vacate()
        self.executor.load_weights(source.model, source.revision)
        if self.weights.model == PUSHED:
            return self._replaced(source, kept=self.weights)
        self.executor.settle_weights(back=False)  # they can be read again
        return self._replaced(source, kept=None)

    def settle_weights(self) -> None:
        """Free the weights before the last replacement, which were kept for the way back."""
        self._kept = None
        self.executor.settle_weights(back=False)

    def _replaced(self, source: WeightsSource, kept: WeightsSource | None) -> WeightsSource:
        self._kept = kept
        before, self.weights = self.weights, source
        self.weight_updates += 1
        fingerprint = self.executor.info.model_fingerprint
        self.setup = replace(self.setup, model_fingerprint=fingerprint)
        self.on_setup(self.setup)
        self.halting.have_weights()
        return before

    def start_profile(self) -> str:
        """Begin to record what steps do; return the directory where the trace will be.

        Raises:
            CannotDo: there is no such directory, or nothing to record.
        """
        if self.profiler_dir is None:
            raise CannotDo("profiles need a place: start the engines with --torch-profiler-dir")
        writable_directory(self.profiler_dir)
        self.executor.start_profile()
        return self.profiler_dir

    def stop_profile(self) -> str:
        """End the recording and return the path of its trace.

        Raises:
            CannotDo: nothing is being recorded.
        """
        name = f"engine-{self.name}-step-{self.steps.count}.json.gz"
        path = Path(self.profiler_dir or "") / name
        self.executor.stop_profile(path)
        return str(path)
