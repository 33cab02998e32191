"""A front end does not stop for the kernel while its connections grow in number."""

import os
import subprocess
import sys

SCRIPT = """
import os, resource, sys
from pathlib import Path
from server.descriptors import make_room_for_descriptors

def table_size():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("FDSize:"))

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), hard))
before = os.listdir("/proc/self/fd")
make_room_for_descriptors()
assert os.listdir("/proc/self/fd") == before, "something was left open"
print(table_size())
"""


def table_size(limit: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(limit)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_the_table_of_descriptors_has_room_for_thousands_from_the_start() -> None:
    limit = os.sysconf("SC_OPEN_MAX")
    assert table_size(limit) >= min(limit, 8192)


def test_a_low_limit_is_respected() -> None:
    assert 300 <= table_size(300) <= 512
