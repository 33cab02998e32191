"""Resource usage of a process, compared with psutil."""

import os

import psutil
import pytest

from engine.shared.process_state import Descriptors, process_use


def test_process_reports_resource_usage() -> None:
    process = psutil.Process()
    held = os.urandom(32 << 20)
    before, use, after = process.cpu_times(), process_use(), process.cpu_times()
    memory = process.memory_info().rss
    assert len(held) <= use.resident_bytes
    assert use.resident_bytes == pytest.approx(memory, rel=0.2)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert before.user + before.system - 2 * tick <= use.cpu_seconds
    assert use.cpu_seconds <= after.user + after.system + 2 * tick
    assert use.started == pytest.approx(process.create_time(), abs=2)
    assert use.started == process_use().started
    assert 3 <= use.open_fds < use.max_fds


def test_descriptors_that_have_been_counted_are_not_counted_again() -> None:
    use = process_use(Descriptors(17, 4096))
    assert (use.open_fds, use.max_fds) == (17, 4096)
