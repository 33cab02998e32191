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
_HELP_SECONDS = 0.01
"""After this time another thread begins with the grammars that wait behind a slow one."""
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
    def is_over(self) -> bool:
        """Whether it takes, or has taken, more than it may, or waits for one that does."""
        seconds = self.seconds
        if seconds is None and self._thread:
            seconds = _thread_seconds(self._thread) - self._began
        if seconds is None:
            running = self.following.running
            return running is not None and running.is_over
        return seconds > MAX_SECONDS


class MaskThreads:
    """Runs the jobs of one step after the other's; started by the first."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "masks")

    def run(self, jobs: Iterable[MaskJob], seconds: float = STEP_SECONDS) -> None:
        """Run jobs, and wait for them; those that are not done then will be, or are dropped."""
        round_ = _Round(jobs)
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0 and round_.has_more:
            self._pool.submit(round_.work)
            if round_.done.wait(min(left, _HELP_SECONDS)):
                return
        round_.done.wait(max(0.0, ends - time.monotonic()))
        round_.is_over = True

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
        self._num_left = len(self._groups)
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.is_over = False
        """Nobody waits any more: what has not begun is dropped."""

    @property
    def has_more(self) -> bool:
        """Whether no thread has begun with some of the grammars."""
        return bool(self._groups)

    def work(self) -> None:
        """Run jobs until none is left."""
        while not self.is_over:
            with self._lock:
                if not self._groups:
                    return
                group = self._groups.pop()
            if group[0].following.lock.acquire(blocking=False):
                try:
                    self._run(group)
                finally:
                    group[0].following.lock.release()
            with self._lock:
                self._num_left -= 1
                if not self._num_left:
                    self.done.set()

    def _run(self, group: Sequence[MaskJob]) -> None:
        for job in group:
            if self.is_over:
                return
            job.work()


def _thread_seconds(thread: int) -> float:
    """Return the processor time of another thread, which runs."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
