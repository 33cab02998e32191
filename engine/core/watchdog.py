"""Ends an engine whose step hangs, so that others can take over its requests.

An engine is hung when a step takes longer than its kind may: `StepWatch` knows since when a step
runs and how long it may take, a thread looks at that. Being busy is not being hung: what a step
may take grows with the tokens that it computes, and the first steps get more.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

HUNG = 4
"""Exit code of an engine that ended itself because a step did not."""

TOKENS = 1024
"""Tokens of a step that may take the configured time; more get more in proportion."""

FIRST_STEPS = 8
"""Steps in which libraries may still allocate, tune and compile."""

FIRST_STEPS_FACTOR = 5.0

MAX_LOOK_INTERVAL = 1.0
"""Maximum seconds between two looks."""

_LAST_WORDS_SECONDS = 0.3
_SHORTEST_STUCK = 10.0


class StepWatch:
    """When the present step began, and how long it may take. No I/O.

    One thread calls `begin` and `end`, others may look.
    """

    def __init__(self, step_timeout: float) -> None:
        self._step_timeout = step_timeout
        self._steps = 0
        self._last_tokens = 0
        self._running: tuple[float, float] | None = None

    def begin(self, tokens: int, now: float) -> None:
        """A step of at most this many tokens begins at `now` (seconds, monotonic)."""
        # With steps overlapped it also waits for the one before.
        worst = tokens + self._last_tokens
        self._last_tokens = tokens
        budget = self._step_timeout * max(1.0, worst / TOKENS)
        if self._steps < FIRST_STEPS:
            budget *= FIRST_STEPS_FACTOR
        self._running = (now, budget)

    def end(self) -> None:
        """The step is over."""
        self._steps += 1
        self._running = None

    def is_within_budget(self, now: float) -> bool:
        """Whether a step runs that may take as long as it has."""
        running = self._running
        return running is not None and now - running[0] <= running[1]

    def hung_for(self, now: float) -> float | None:
        """Return for how many seconds the present step runs, if that is longer than it may."""
        running = self._running
        if running is None or now - running[0] <= running[1]:
            return None
        return now - running[0]


class Watchdog:
    """A thread that looks at a `StepWatch` and ends the process when a step is hung.

    Before that it writes the stacks of all threads to stderr and says why through `on_hung`. If
    code that holds the interpreter's lock keeps even this thread from running, a thread of the
    C library does the same, without the last words.
    """

    def __init__(
        self, watch: StepWatch, step_timeout: float, on_hung: Callable[[str], None]
    ) -> None:
        self._watch = watch
        self._interval = min(MAX_LOOK_INTERVAL, step_timeout / 4)
        self._stuck_after = max(_SHORTEST_STUCK, step_timeout)
        self._on_hung = on_hung
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._wind_up()
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self._wind_up()
            seconds = self._watch.hung_for(time.monotonic())
            if seconds is not None:
                reason = f"a step has not ended for {seconds:.1f} s (--step-timeout)"
                logger.error("%s; this is where it hangs:", reason)
                faulthandler.dump_traceback(all_threads=True)
                self._on_hung(reason)
                time.sleep(_LAST_WORDS_SECONDS)
                os._exit(HUNG)

    def _wind_up(self) -> None:
        """Restart the wait of the C library's thread."""
        faulthandler.dump_traceback_later(self._stuck_after, exit=True)
