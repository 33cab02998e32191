"""Computes grammar masks in threads, for which the stepping thread waits for a limited time.

The grammar library cannot be interrupted. A mask that takes too long continues in its thread; its
sequence samples again later, or fails, and the steps of other sequences continue.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

logger = logging.getLogger(__name__)

MAX_SECONDS = 0.05
"""Maximum processor time of one sequence's masks per step; beyond it the sequence fails."""
STEP_SECONDS = 0.06
"""Maximum seconds that a step waits for all of its masks."""
PATIENCE = 0.004
"""Processor time of one mask above which a step with other sequences does not wait for it.
"""
_POLL_SECONDS = PATIENCE
"""Seconds after which more threads start on the grammars queued behind a slow one."""
_THREADS = 4
"""Number of masks that can be slow at a time; beyond it grammars wait for them."""


class GrammarState:
    """Serializes the calls of the library for one grammar, whose state it locks internally.

    A second thread would block in the library until the first has computed its mask, and delay the
    whole step.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the thread that computes masks."""
        self.running: MaskJob | None = None
        """The job of that thread."""
        self.seconds = 0.0
        """Processor time of the newest masks."""


class MaskJob:
    """The masks of one sequence in one step."""

    __slots__ = ("_started_at", "_thread", "failed", "run", "seconds", "state")

    def __init__(self, state: GrammarState, run: Callable[[], None]) -> None:
        self.state = state
        self.run = run
        self.seconds: float | None = None
        """Processor time in seconds; None until done."""
        self.failed = False
        """Whether it is done without a result, since it raised."""
        self._thread = 0
        self._started_at = 0.0

    def work(self) -> None:
        """Compute the masks in the calling thread."""
        self._started_at = time.thread_time()
        self._thread = threading.get_ident()
        self.state.running = self  # from here on other threads can call `cpu_seconds`
        try:
            self.run()
        except BaseException:  # the library's panics are no Exceptions
            self.failed = True
            logger.exception("a grammar mask cannot be computed")
        self.seconds = self.state.seconds = time.thread_time() - self._started_at
        self.state.running = None

    @property
    def has_started(self) -> bool:
        """Whether a thread has started it."""
        return self._thread != 0

    @property
    def cpu_seconds(self) -> float | None:
        """Processor time taken so far; None if it has not started."""
        seconds = self.seconds
        if seconds is None and self._thread:
            clock = time.pthread_getcpuclockid(self._thread)
            seconds = time.clock_gettime(clock) - self._started_at
        return seconds

    @property
    def is_over(self) -> bool:
        """Whether it exceeds the limit, or is queued behind a job of its grammar that does."""
        seconds = self.cpu_seconds
        if seconds is None:
            running = self.state.running
            return running is not None and running.is_over
        return seconds > MAX_SECONDS


class MaskThreads:
    """Runs the jobs of successive steps; threads start on first use."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "masks")
        self._unfinished: list[MaskJob] = []
        """Jobs that still run although their steps no longer wait for them."""
        self._newest = MaskRound(())

    def start(self, jobs: Iterable[MaskJob]) -> "MaskRound":
        """Start running the jobs of a step, in order of their grammars' newest times.

        If nothing has waited for the previous step's jobs, they are dropped as if it had.
        """
        if not self._newest.is_over and not self._newest.done.is_set():
            self._end(self._newest)
        batch = self._newest = MaskRound(jobs)
        self._unfinished = [job for job in self._unfinished if job.seconds is None]
        if batch.num_waiting and len(self._unfinished) < _THREADS:
            self._pool.submit(batch.work)
        return batch

    def wait(self, batch: "MaskRound", patience: float, seconds: float = STEP_SECONDS) -> None:
        """Wait for jobs; when the wait ends, running jobs continue and the rest are dropped.

        Args:
            batch: the newest ones.
            patience: processor time up to which the step waits for a job.
            seconds: maximum wait.
        """
        free = _THREADS - len(self._unfinished)
        deadline = time.monotonic() + seconds
        while free > 0 and (remaining := deadline - time.monotonic()) > 0:
            if batch.done.wait(min(remaining, _POLL_SECONDS)):
                return
            if not batch.is_worth_waiting(free, patience):
                break
            for _ in range(min(free - 1, batch.num_waiting)):
                self._pool.submit(batch.work)
        self._end(batch)

    def _end(self, batch: "MaskRound") -> None:
        batch.is_over = True
        self._unfinished += batch.running()

    def shutdown(self) -> None:
        """Start no more jobs; idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class MaskRound:
    """The jobs of one step; those of one grammar run sequentially.

    They share its state, and threads that contend for it take several times as long.
    """

    def __init__(self, jobs: Iterable[MaskJob]) -> None:
        by_grammar: dict[int, list[MaskJob]] = {}
        for job in jobs:
            by_grammar.setdefault(id(job.state), []).append(job)
        self._groups = sorted(by_grammar.values(), key=lambda group: group[0].state.seconds)
        self._groups.reverse()  # popped from the end, cheapest first
        self._started: list[list[MaskJob]] = []
        self._num_remaining = len(self._groups)
        self._lock = threading.Lock()
        self.done = threading.Event()
        if not self._groups:
            self.done.set()
        self.is_over = False
        """The step no longer waits: jobs that have not started are dropped."""

    @property
    def num_waiting(self) -> int:
        """Number of grammars that no thread has started on."""
        return len(self._groups)

    def running(self) -> list[MaskJob]:
        """Return the jobs that are currently running."""
        with self._lock:
            started = [job for group in self._started for job in group]
        return [job for job in started if job.has_started and job.seconds is None]

    def is_worth_waiting(self, threads: int, patience: float) -> bool:
        """Return whether some thread is running, or about to run, a job not known to be slow.

        Only processor time counts, not time spent waiting for a CPU.
        """
        running = self.running()
        slow = sum((job.cpu_seconds or 0.0) > patience for job in running)
        return slow < len(running) or slow < min(threads, self._num_remaining)

    def work(self) -> None:
        """Run jobs until none is left."""
        while not self.is_over:
            with self._lock:
                if not self._groups:
                    return
                group = self._groups.pop()
                self._started.append(group)
            if group[0].state.lock.acquire(blocking=False):
                try:
                    self._run(group)
                finally:
                    group[0].state.lock.release()
            with self._lock:
                self._started.remove(group)
                self._num_remaining -= 1
                if not self._num_remaining:
                    self.done.set()

    def _run(self, group: Sequence[MaskJob]) -> None:
        for job in group:
            if self.is_over:
                return
            job.work()
