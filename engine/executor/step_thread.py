"""Runs an executor's steps, in a separate thread or in the caller's."""

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
    """Runs steps in order, one at a time.

    If steps overlap, they run in a separate thread and `submit` returns immediately (torch releases
    the GIL while it computes); otherwise `submit` returns when the step is done.
    """

    def __init__(self, device: torch.device, *, own_thread: bool) -> None:
        """Create it; with `own_thread`, steps overlap with the caller's work."""
        self.pool = _one_thread(device) if own_thread else None
        """The thread, if it is separate."""
        self._in_group = False
        self._loss: Exception | None = None
        """Error of a failed step in a group, which fails all later steps."""
        self._profile: profile | None = None

    def submit(
        self, run: Callable[[BatchPlan], BatchResult], plan: BatchPlan
    ) -> "Future[BatchResult]":
        """Run a step, or queue it to the thread."""
        if self.pool is not None:
            return self.pool.submit(self._run, run, plan)
        finished: Future[BatchResult] = Future()
        try:
            finished.set_result(run(plan))
        except Exception as error:  # raised to whoever waits for this step
            finished.set_exception(error)
        return finished

    def regroup(self) -> None:
        """Clear a group's failure, as steps use another group from now on; none may be in flight.

        In a group no step may follow a failed one: it needs tokens of the failed step, and other
        members would mistake its collectives for the ones they still wait for.
        """
        self._in_group = True
        self._loss = None

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function between two steps and return its result; propagates exceptions."""
        return function() if self.pool is None else self.pool.submit(function).result()

    def start_profile(self) -> None:
        """Start recording a profile in memory: record seconds, not hours.

        Raises:
            CannotDo: a profile is already being recorded.
        """
        if self._profile is not None:
            raise CannotDo("a profile is being recorded already")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        recorded = profile(activities=activities)
        self.call(recorded.start)
        self._profile = recorded

    def stop_profile(self, path: Path) -> None:
        """Stop recording and write the trace, gzipped if the file name ends in .gz.

        Missing directories are created.

        Raises:
            CannotDo: no profile is being recorded.
            OSError: the trace cannot be written; a partial file is removed.
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
        """Finish the running step and cancel the queued ones."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


def _one_thread(device: torch.device) -> ThreadPoolExecutor:
    """Return a one-thread pool that computes with the caller's torch thread count."""
    threads = torch.get_num_threads()

    def begin() -> None:  # both settings are per thread
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(1, thread_name_prefix="executor", initializer=begin)
