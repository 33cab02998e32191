"""Where an executor runs its steps: in a thread of their own, or in the caller's."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import CannotDo

Result = TypeVar("Result")


class StepThread:
    """Runs steps one after the other, in order.

    Where steps overlap they run in a thread of their own and `submit` returns at once (torch
    releases the GIL while it computes); else `submit` returns when the step is done.
    """

    def __init__(self, device: torch.device, *, own: bool) -> None:
        """Make it; `own` if steps, which compute on a device, overlap with what the caller does."""
        self.pool = _one_thread(device) if own else None
        """The thread, where there is one of its own."""
        self._in_group = False
        self._loss: Exception | None = None
        """Why a step of a group has failed, and with it those after it."""
        self._profile: profile | None = None

    def submit(
        self, run: Callable[[BatchPlan], BatchResult], plan: BatchPlan
    ) -> "Future[BatchResult]":
        """Run a step, or have the thread run it after those before it."""
        if self.pool is not None:
            return self.pool.submit(self._run, run, plan)
        finished: Future[BatchResult] = Future()
        try:
            finished.set_result(run(plan))
        except Exception as error:  # belongs to whoever waits for this step
            finished.set_exception(error)
        return finished

    def regroup(self) -> None:
        """Steps hold collectives with another group from now on; none is in flight.

        In a group no step follows one that failed: it needs tokens of that, and the other members
        would take its collectives for those that they still wait for.
        """
        self._in_group = True
        self._loss = None

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function between two steps, and wait for it; raises what it raises."""
        return function() if self.pool is None else self.pool.submit(function).result()

    def start_profile(self) -> None:
        """Begin to record what steps do, in memory: record seconds, not hours.

        Raises:
            CannotDo: a profile is being recorded.
        """
        if self._profile is not None:
            raise CannotDo("a profile is being recorded already")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        recorded = profile(activities=activities, acc_events=True)
        self.call(recorded.start)
        self._profile = recorded

    def stop_profile(self, path: Path) -> None:
        """End the recording and write its trace, gzipped if the name ends so.

        Missing directories are made.

        Raises:
            CannotDo: nothing is being recorded.
            OSError: the trace cannot be written; nothing of it is left.
        """
        recorded, self._profile = self._profile, None
        if recorded is None:
            raise CannotDo("no profile is being recorded")

        def write() -> None:
            recorded.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                recorded.export_chrome_trace(str(path))
            except BaseException:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                raise

        self.call(write)

    def _run(self, run: Callable[[BatchPlan], BatchResult], plan: BatchPlan) -> BatchResult:
        if self._loss is not None:
            raise self._loss
        try:
            return run(plan)
        except Exception as error:
            self._loss = error if self._in_group else None
            raise

    def shutdown(self) -> None:
        """Let the step that runs end; the others never begin."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


def _one_thread(device: torch.device) -> ThreadPoolExecutor:
    """Return one thread that computes with as many threads as the caller would."""
    threads = torch.get_num_threads()

    def begin() -> None:  # both are each thread's own
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(1, thread_name_prefix="executor", initializer=begin)
