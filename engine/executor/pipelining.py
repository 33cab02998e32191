"""Several steps of a pipeline in flight: each begins as soon as its tokens are known."""

import threading
from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from engine.batch.batch import BatchPlan, BatchResult
from engine.runner.model_runner import ModelRunner, StartedStep


@dataclass(slots=True)
class _Step:
    number: int
    plan: BatchPlan
    follows: int
    """Number of the step that samples the last of its input tokens."""
    started: StartedStep | None = None
    error: Exception | None = None
    """Why it could not begin."""


class PipelinedSteps:
    """Runs the plans of one runner in order, each in two parts.

    A step begins, which starts the earlier stages, in the submitting thread or, if an input token
    is still to be sampled, right after the step that samples it. It is finished in a separate
    thread, so tokens reach the first stage without waiting for the engine's loop.
    """

    def __init__(self, runner: ModelRunner, thread: Executor) -> None:
        """Run steps on a runner; `thread` runs one function at a time, in order."""
        self._runner = runner
        self._thread = thread
        self._lock = threading.Lock()
        self._submitted = 0
        self._finished = 0
        self._waiting: deque[_Step] = deque()
        """Steps that have not begun."""
        self._drawn_by: dict[int, int] = {}
        """Newest step that samples a token, by slot."""

    def submit(self, plan: BatchPlan) -> "Future[BatchResult]":
        """Begin a step if possible; return a future of its result."""
        with self._lock:
            self._submitted += 1
            before = self._waiting[-1].follows if self._waiting else 0
            follows = max([before, *(self._drawn_by.get(slot, 0) for slot in plan.slots)])
            step = _Step(self._submitted, plan, follows)
            for slot, draws in zip(plan.slots, plan.samples, strict=True):
                if draws:
                    self._drawn_by[slot] = step.number
            self._waiting.append(step)
            self._start_ready()
        return self._thread.submit(self._finish, step)

    def _start_ready(self) -> None:
        """Begin the steps whose input tokens are known, in order; the lock must be held."""
        while self._waiting and self._waiting[0].follows <= self._finished:
            step = self._waiting.popleft()
            try:
                step.started = self._runner.begin(step.plan)
            except Exception as error:  # raised to whoever waits for this step
                step.error = error

    def _finish(self, step: _Step) -> BatchResult:
        try:
            if step.error is not None:
                raise step.error
            return self._runner.finish(step.started)
        finally:
            with self._lock:
                self._finished = step.number
                self._start_ready()
