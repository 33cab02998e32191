"""Scheduling priorities of threads."""

import os
import sys
import threading
from pathlib import Path

import pytest

from engine.distributed.backend import use_batch_scheduling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are no batch threads")


@pytest.mark.parametrize(
    ("name", "chosen", "after"),
    [
        ("gloo_tcp_loop", "SCHED_OTHER", "SCHED_BATCH"),
        ("gloo_tcp_loop", "SCHED_IDLE", "SCHED_IDLE"),
        ("another", "SCHED_OTHER", "SCHED_OTHER"),
    ],
)
def test_gloo_threads_get_batch_scheduling_unless_policy_was_set(
    name: str, chosen: str, after: str
) -> None:
    found = []

    def run() -> None:
        thread = threading.get_native_id()
        Path(f"/proc/self/task/{thread}/comm").write_text(name)
        os.sched_setscheduler(thread, getattr(os, chosen), os.sched_param(0))
        use_batch_scheduling()
        found.append(os.sched_getscheduler(thread))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [getattr(os, after)]
