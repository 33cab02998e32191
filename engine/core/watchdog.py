"""Ends an engine whose step hangs, so that others can take over its requests.

An engine is hung when a step exceeds its time limit: `StepWatch` records the start and the limit of
the current step, and a thread checks it. A busy engine is not hung: the limit grows with the step's
tokens, and is larger for the first steps.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

HUNG_EXIT_CODE = 4
"""Exit code of an engine that ended itself because of a hung step."""

TOKENS = 1024
"""Tokens per step covered by the configured time limit; it grows in proportion beyond that."""

FIRST_STEPS = 8
"""Number of initial steps in which libraries may still allocate, tune and compile."""

FIRST_STEPS_FACTOR = 5.0

MAX_CHECK_INTERVAL = 1.0
"""Maximum seconds between two checks."""

_REPORT_SECONDS = 0.3
_MIN_STUCK_SECONDS = 10.0


class StepWatch:
    """Start and time limit of the current step. No I/O.

    One thread calls `begin` and `end`; any thread may call the other methods.
    """

    def __init__(self, step_timeout: float) -> None:
        self._step_timeout = step_timeout
        self._steps = 0
        self._last_tokens = 0
        self._running: tuple[float, float] | None = None

    def begin(self, tokens: int, now: float) -> None:
        """Record that a step of at most this many tokens starts at `now` (seconds, monotonic)."""
        # With overlapped steps it also waits for the previous one.
        worst = tokens + self._last_tokens
        self._last_tokens = tokens
        budget = self._step_timeout * max(1.0, worst / TOKENS)
        if self._steps < FIRST_STEPS:
            budget *= FIRST_STEPS_FACTOR
        self._running = (now, budget)

    def end(self) -> None:
        """Record the end of the step."""
        self._steps += 1
        self._running = None

    def is_within_budget(self, now: float) -> bool:
        """Return whether a step is running and within its time limit."""
        running = self._running
        return running is not None and now - running[0] <= running[1]

    def hung_for(self, now: float) -> float | None:
        """Return the seconds since the step started if it exceeds its limit, else None."""
        running = self._running
        if running is None or now - running[0] <= running[1]:
            return None
        return now - running[0]


class Watchdog:
    """A thread that checks a `StepWatch` and ends the process when a step hangs.

    Before that it writes the stacks of all threads to stderr and reports the reason to `on_hung`.
    If code that holds the GIL blocks even this thread, a thread of `faulthandler` does the same,
    without reporting.
    """

    def __init__(
        self, watch: StepWatch, step_timeout: float, on_hung: Callable[[str], None]
    ) -> None:
        self._watch = watch
        self._interval = min(MAX_CHECK_INTERVAL, step_timeout / 4)
        self._stuck_after = max(_MIN_STUCK_SECONDS, step_timeout)
        self._on_hung = on_hung
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start checking."""
        self._rearm()
        self._thread.start()

    def stop(self) -> None:
        """Stop checking."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self._rearm()
            seconds = self._watch.hung_for(time.monotonic())
            if seconds is not None:
                reason = f"a step has not ended for {seconds:.1f} s (--step-timeout)"
                logger.error("%s; this is where it hangs:", reason)
                faulthandler.dump_traceback(all_threads=True)
                self._on_hung(reason)
                time.sleep(_REPORT_SECONDS)
                os._exit(HUNG_EXIT_CODE)

    def _rearm(self) -> None:
        faulthandler.dump_traceback_later(self._stuck_after, exit=True)
