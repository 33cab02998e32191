"""The kernel does not stall a front end while its number of connections grows."""

import os
import resource
import subprocess
import sys

import pytest

from server.http.descriptors import room_for_connections

SCRIPT = """
import os, resource, sys
from pathlib import Path
from server.http.descriptors import grow_descriptor_table

def table_size():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("FDSize:"))

soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
before = os.listdir("/proc/self/fd")
grow_descriptor_table()
assert os.listdir("/proc/self/fd") == before, "something was left open"
print(table_size())
"""


def table_size(soft: int, hard: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(soft), str(hard)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout)


def test_descriptor_table_is_sized_for_thousands_at_start() -> None:
    limit = os.sysconf("SC_OPEN_MAX")
    assert table_size(limit, limit) >= min(limit, 8192)


def test_a_low_limit_is_respected() -> None:
    assert 300 <= table_size(300, 300) <= 512


def test_thousand_connections_do_not_lock_out_others() -> None:
    hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert table_size(1024, hard) >= hard


def test_connections_leave_descriptors_for_other_uses() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert room_for_connections(10) == 10
    if limit != resource.RLIM_INFINITY:
        assert room_for_connections(limit + 1) < limit


@pytest.mark.parametrize(("limit", "room"), [(256, 128), (1024, 768)])
def test_a_limit_that_is_too_low_is_logged(
    limit: int, room: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert room_for_connections(room) == room
    assert caplog.text == ""
    assert room_for_connections(8192) == room
    assert f"only {room} connections" in caplog.text
    assert f"the limit of open files is {limit}" in caplog.text
