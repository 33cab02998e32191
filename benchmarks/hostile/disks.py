"""Full file systems, and the answers of a server on one."""

import contextlib
import errno
import json
import os
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.running_stack import RunningStack

_REQUESTS = 400
_METADATA = {str(number): "x" * 512 for number in range(16)}
"""8 KiB, the maximum that a response stores without engine work."""


@contextlib.contextmanager
def small_disk(at: Path, megabytes: int = 4) -> Iterator[Path]:
    """Mount a file system of this size; requires root.

    Raises:
        OSError: it cannot be mounted here.
    """
    at.mkdir()
    options = f"size={megabytes}m,mode=700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)]
    if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        raise OSError(f"no file system can be mounted at {at}: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill(disk: Path) -> Path:
    """Fill a file system to the last byte; return the file that fills it."""
    path = disk / "fill"
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        for size in (1 << 16, 1 << 12, 1 << 9):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file, bytes(size))
    finally:
        os.close(file)
    assert os.statvfs(disk).f_bavail == 0, os.strerror(errno.ENOSPC)
    return path


def full_disk() -> tuple[str, list[str]]:
    """Store responses on a 4 MB disk until it is full, then fill it; a new engine joins.

    Returns:
        The outcome, and any problems.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        small_disk(Path(folder) / "disk") as disk,
        RunningStack(
            "--executor", "simulated", "--data-parallel-size", "1", "--api-server-count", "2",
            "--admin-key", "a", "--response-store-bytes", str(disk_bytes := 4 << 20),
            "--socket-dir", str(disk / "node"), "--log-level", "error",
        ) as stack,
    ):  # fmt: skip
        pids = {name: process.pid for name, process in stack.processes().items()}
        before = _store_responses(stack.url)
        fill(disk)
        _ask(f"{stack.url}/admin/scale", {"data_parallel_size": 2})
        after = _store_responses(stack.url)
        now = {name: process.pid for name, process in stack.processes().items()}
        died = [name for name, pid in pids.items() if now.get(name) != pid]
    wrong = [f"{name} died" for name in died]
    for when, statuses in (("before it was full", before), ("on a full disk", after)):
        wrong += [f"{n} times {what} {when}" for what, n in statuses.items() if what != "kept"]
    return f"{before['kept'] + after['kept']} kept on {disk_bytes >> 20} MB", wrong


def _store_responses(url: str) -> Counter[str]:
    """Store and read responses; return counts of the outcomes."""
    found: Counter[str] = Counter()
    body = {"input": "hi", "max_output_tokens": 1, "store": True, "metadata": _METADATA}
    for _ in range(_REQUESTS):
        status, text = _ask(f"{url}/v1/responses", body)
        if status == 200:
            status, _ = _ask(f"{url}/v1/responses/{json.loads(text)['id']}")
        found["kept" if status == 200 else str(status)] += 1
    return found


def _ask(url: str, body: object = None) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer a"}
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""
    except OSError:
        return 0, b""
