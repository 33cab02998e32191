"""Computes masks in threads, for which the thread that steps waits only so long.

The library cannot be interrupted. A mask that takes too long is left to its thread, and its
sequence draws again later, or ends; the steps of others go on.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

MAX_SECONDS = 0.05
"""Processor time of one sequence's masks in a step; one that needs more ends with an error."""
STEP_SECONDS = 0.06
"""What a step waits for all its masks together."""
PATIENCE = 0.004
"""Processor time of one mask for which a step of others waits; what takes more is for a later step.
"""
_LOOK_SECONDS = PATIENCE
"""After this time other threads begin with the grammars that wait behind a slow one."""
_THREADS = 4
"""As many masks may take long at a time; then grammars wait for them."""


class Following:
    """Which thread follows a grammar: what is known of it is shared, and guarded by the library.

    Whoever else asked the library about the grammar would wait for that thread, and hold up all
    others.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the thread that computes masks."""
        self.running: MaskJob | None = None
        """What that thread computes."""
        self.seconds = 0.0
        """Processor time of the newest masks."""


class MaskJob:
    """The masks of one sequence in one step."""

    __slots__ = ("_began", "_thread", "following", "run", "seconds")

    def __init__(self, following: Following, run: Callable[[], None]) -> None:
        self.following = following
        self.run = run
        self.seconds: float | None = None
        """Processor time that it took; None while it is not done."""
        self._thread = 0
        self._began = 0.0

    def work(self) -> None:
        """Compute the masks, in this thread."""
        self._began = time.thread_time()
        self._thread = threading.get_ident()
        self.following.running = self  # from here on others may ask how long it has taken
        self.run()
        self.seconds = self.following.seconds = time.thread_time() - self._began
        self.following.running = None

    @property
    def has_begun(self) -> bool:
        """Whether a thread computes it, or has."""
        return self._thread != 0

    @property
    def taken(self) -> float | None:
        """Processor time that it took, or has taken so far; None if it has not begun."""
        seconds = self.seconds
        if seconds is None and self._thread:
            clock = time.pthread_getcpuclockid(self._thread)
            seconds = time.clock_gettime(clock) - self._began
        return seconds

    @property
    def is_over(self) -> bool:
        """Whether it takes, or has taken, more than it may, or waits for one that does."""
        seconds = self.taken
        if seconds is None:
            running = self.following.running
            return running is not None and running.is_over
        return seconds > MAX_SECONDS


class MaskThreads:
    """Runs the jobs of one step after the other's; started by the first."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "masks")
        self._left: list[MaskJob] = []
        """Jobs that their steps have not waited for, and that still run."""

    def run(self, jobs: Iterable[MaskJob], patience: float, seconds: float = STEP_SECONDS) -> None:
        """Run jobs, and wait for them; those that have begun then will be done, others are dropped.

        Args:
            jobs: the masks of a step.
            patience: processor time of a job for which the step waits.
            seconds: what it waits at most.
        """
        round_ = _Round(jobs)
        self._left = [job for job in self._left if job.seconds is None]
        free = _THREADS - len(self._left)
        ends, helpers = time.monotonic() + seconds, 1
        while free > 0 and (left := ends - time.monotonic()) > 0:
            for _ in range(min(helpers, round_.num_waiting)):
                self._pool.submit(round_.work)
            if round_.done.wait(min(left, _LOOK_SECONDS)):
                return
            if not round_.is_worth_waiting(free, patience):
                break
            helpers = free - 1
        round_.is_over = True
        self._left += round_.running()

    def shutdown(self) -> None:
        """Begin nothing more; idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Round:
    """The jobs of one step, those of one grammar one after the other.

    They share what is known of it, and threads that wait for each other there take several times
    as long.
    """

    def __init__(self, jobs: Iterable[MaskJob]) -> None:
        by_grammar: dict[int, list[MaskJob]] = {}
        for job in jobs:
            by_grammar.setdefault(id(job.following), []).append(job)
        self._groups = sorted(by_grammar.values(), key=lambda group: group[0].following.seconds)
        self._groups.reverse()  # the last ones are the cheapest, and taken first
        self._begun: list[list[MaskJob]] = []
        self._num_left = len(self._groups)
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.is_over = False
        """Nobody waits any more: what has not begun is dropped."""

    @property
    def num_waiting(self) -> int:
        """Grammars that no thread has begun with."""
        return len(self._groups)

    def running(self) -> list[MaskJob]:
        """Return the jobs that threads are busy with."""
        with self._lock:
            begun = [job for group in self._begun for job in group]
        return [job for job in begun if job.has_begun and job.seconds is None]

    def is_worth_waiting(self, threads: int, patience: float) -> bool:
        """Whether a thread does, or is about to do, what does not take long as far as is known.

        Time in which a thread waited for a processor does not count.
        """
        running = self.running()
        slow = sum((job.taken or 0.0) > patience for job in running)
        return slow < len(running) or slow < min(threads, self._num_left)

    def work(self) -> None:
        """Run jobs until none is left."""
        while not self.is_over:
            with self._lock:
                if not self._groups:
                    return
                group = self._groups.pop()
                self._begun.append(group)
            if group[0].following.lock.acquire(blocking=False):
                try:
                    self._run(group)
                finally:
                    group[0].following.lock.release()
            with self._lock:
                self._begun.remove(group)
                self._num_left -= 1
                if not self._num_left:
                    self.done.set()

    def _run(self, group: Sequence[MaskJob]) -> None:
        for job in group:
            if self.is_over:
                return
            job.work()
