"""How gloo's threads share a core with the threads that they work for."""

import contextlib
import os
from pathlib import Path

_NAME = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")


def let_others_finish() -> None:
    """Have this process's gloo threads no longer interrupt whatever runs on their core.

    A thread of gloo that is woken by data for a connection asks the kernel again and again for as
    long as another thread holds that connection's lock. If it has taken the core from that very
    thread, it does so for its whole time slice: an exchange that takes a third of a millisecond
    then takes several. As a batch thread (`SCHED_BATCH`) it begins when the other has paused; it
    still gets its share of the core, and begins at once on one that is idle.

    Does nothing to a thread that has been given a policy already, nor outside Linux.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended, or that is not allowed here
            is_ordinary = os.sched_getscheduler(int(thread.name)) == os.SCHED_OTHER
            if is_ordinary and (thread / "comm").read_text().strip() == _NAME:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
