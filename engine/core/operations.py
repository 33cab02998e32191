"""Operators' queries and actions on a serving engine."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from engine.batch.executor import CannotDo, Executor
from engine.core.adapter_manager import AdapterManager
from engine.core.extensions import Extensions
from engine.core.front_ends import FrontEnds
from engine.core.halting import FLEET, Halting
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
    """Carries out operator calls on one engine; `utilities` maps call names to these methods."""

    setup: EngineSetup
    halting: Halting
    stats: Callable[[], EngineStats]
    """Returns current load and counters, with a version above all earlier ones."""
    steps: Steps
    scheduler: Scheduler
    executor: Executor
    adapters: AdapterManager
    front_ends: FrontEnds
    weights: WeightsSource
    """The current weights."""
    weights_dir: str | None
    has_workers: bool
    on_setup: Callable[[EngineSetup], None]
    profiler_dir: str | None
    name: str
    """Distinguishes the engine's recordings in `profiler_dir` from others'."""
    extensions: Extensions

    def __post_init__(self) -> None:
        self.vocab_size = self.executor.info.vocab_size
        self.weight_updates = 0
        """Number of times that the weights have been replaced."""
        self._previous_weights: WeightsSource | None = None
        """The previous weights, while they are kept."""
        self._configured_weights = self.weights

    def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes and return their number of blocks."""
        return self.scheduler.reset_prefix_cache(tiers=True)

    @property
    def is_paused(self) -> bool:
        """Whether nothing runs until `resume`."""
        return self.halting.is_paused or not (self.scheduler.admits or self.scheduler.runs_any)

    def execute_dummy_batch(self) -> int:
        """Schedule a one-token step whose output is discarded (in a group: on all engines); return
        the number of steps launched so far.

        Does nothing if there are requests, which cause steps anyway.

        Raises:
            CannotDo: the engine is paused or asleep.
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
        """Launch no steps, or with `wait` start no requests: the pause begins once running ones
        end."""
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
        """Release the executor's memory; all requests wait and will be recomputed.

        Level 0 releases nothing, level 1 keeps the weights where they can be restored quickly,
        level 2 drops them. With `move` requests go to other engines as soon as one can accept them,
        with `abort` they end.

        Raises:
            CannotDo: a step that its group gave up has to be repeated first, or the weights could
                not be loaded again.
            StepFailed: a step in flight failed; the engine cannot continue.
        """
        if level > 1 and self.weights.model == PUSHED:
            raise CannotDo("weights that a trainer has sent cannot be read again: sleep at level 1")
        started_at = time.monotonic()
        if level:
            self.steps.vacate()
        if mode == "abort":
            self.front_ends.collect(self.scheduler.abort_all())
        self.halting.sleep(level, hand_over=mode == "move")
        if level:
            self.executor.sleep(level)
            self.scheduler.counters.count_sleep(time.monotonic() - started_at)

    def wake_up(self, tags: set[str] | None = None) -> None:
        """Restore the memory of these tags, by default all; the last tag ends the sleep.

        Raises:
            CannotDo: the KV cache cannot be restored without the weights.
            Exception: the executor failed; the engine stays asleep.
        """
        requested = set(ASLEEP_TAGS) if tags is None else tags
        asleep = self.halting.asleep
        remaining = asleep - requested
        if "weights" in remaining and "kv_cache" in asleep & requested:
            raise CannotDo("the KV cache needs the weights: wake up weights first, or both")
        started_at = time.monotonic()
        if asleep & requested or not asleep:
            self.executor.wake_up(kv_cache="kv_cache" not in remaining)
        if asleep & requested:
            self.scheduler.counters.count_wake_up(time.monotonic() - started_at)
        self.halting.wake_up(requested)

    def load_weights(self, source: WeightsSource, after: int) -> WeightsSource:
        """Use other weights from the next step on; return the source of the previous ones.

        They are read, or have been sent by a trainer, or are kept from before the last replacement.
        Optimistic locking: fails unless `weight_updates` equals `after`, so that of two concurrent
        callers one is refused.

        All requests continue from their tokens so far, which are recomputed, and no cached prefix
        outlives its weights.

        Raises:
            CannotDo: they cannot be loaded; nothing has changed.
            StepFailed: a step in flight failed; the engine cannot continue.
        """
        if after != self.weight_updates:
            raise CannotDo("its weights were replaced meanwhile")
        if source == self._previous_weights:
            self.steps.vacate()
            self.executor.settle_weights(revert=True)
            return self._set_weights(source, previous=None)
        if source.model == PUSHED:
            self.steps.vacate()
            self.executor.take_weights()
            return self._set_weights(source, previous=self.weights)
        if self.has_workers:
            raise CannotDo(
                "only single-process engines can replace weights: restart those of "
                "--tensor-parallel-size, --pipeline-parallel-size and --enable-expert-parallel"
            )
        model = Path(source.model).expanduser().resolve()
        is_below = self.weights_dir is not None and model.is_relative_to(
            Path(self.weights_dir).expanduser().resolve()
        )
        is_hub_id = HUB_ID.fullmatch(source.model) and not model.exists()
        if not (is_below or is_hub_id or source == self._configured_weights):
            raise CannotDo(f"{source.model} is neither a hub id nor below --weights-dir")
        self.steps.vacate()
        self.executor.load_weights(source.model, source.revision)
        if self.weights.model == PUSHED:
            return self._set_weights(source, previous=self.weights)
        self.executor.settle_weights(revert=False)  # the previous ones can be read again
        return self._set_weights(source, previous=None)

    def settle_weights(self) -> None:
        """Free the previous weights, which were kept to allow going back."""
        self._previous_weights = None
        self.executor.settle_weights(revert=False)

    def _set_weights(self, source: WeightsSource, previous: WeightsSource | None) -> WeightsSource:
        self._previous_weights = previous
        before, self.weights = self.weights, source
        self.weight_updates += 1
        fingerprint = self.executor.info.model_fingerprint
        self.setup = replace(self.setup, model_fingerprint=fingerprint)
        self.on_setup(self.setup)
        self.halting.have_weights()
        return before

    def start_profile(self) -> str:
        """Start recording steps; return the directory of the trace.

        Raises:
            CannotDo: no directory is configured, or there is nothing to record.
        """
        if self.profiler_dir is None:
            raise CannotDo("no directory for profiles: start the engines with --torch-profiler-dir")
        writable_directory(self.profiler_dir)
        self.executor.start_profile()
        return self.profiler_dir

    def stop_profile(self) -> str:
        """Stop recording and return the path of the trace.

        Raises:
            CannotDo: nothing is being recorded.
        """
        name = f"engine-{self.name}-step-{self.steps.count}.json.gz"
        path = Path(self.profiler_dir or "") / name
        self.executor.stop_profile(path)
        return str(path)
