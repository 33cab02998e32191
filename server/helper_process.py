"""Child process for clients' untrusted jobs: killable, memory-limited, and without secrets.

Jobs are written to its standard input and results read from its standard output, each prefixed by
its length in four bytes.
"""

import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import BinaryIO

_LENGTH = struct.Struct(">I")
_NICE = 5
_START_SECONDS = 30.0


class HelperProcess:
    """A child process that is started on the first job, and restarted after a job killed it.

    Args:
        module: module to run, with a `main` that calls `serve`.
        first: a job without effect that makes the process import what it needs.
    """

    def __init__(self, module: str, first: bytes) -> None:
        self._module = module
        self._first = first
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def answer(self, job: bytes, seconds: float) -> bytes | None:
        """Return the result of a job; None if it exceeded a limit, which kills the process.

        Args:
            job: the encoded job; only one at a time.
            seconds: wall-clock timeout.

        Raises:
            OSError: the process could not be started.
        """
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._process = _start(self._module)
            self._end = weakref.finalize(self, _end, self._process)
            if _exchange(self._process, self._first, _START_SECONDS) is None:
                self.end()
                raise OSError(f"{self._module} did not start")
        found = _exchange(self._process, job, seconds)
        if found is None:
            self.end()
        return found

    def end(self) -> None:
        """Kill the process; idempotent."""
        self._end()
        self._process = None


def serve(
    answer: Callable[[bytes], bytes],
    max_bytes: int,
    seconds: float,
    timer: int = signal.ITIMER_REAL,
) -> None:
    """Process the jobs of a `HelperProcess` until its input ends.

    Args:
        answer: runs a job.
        max_bytes: limit of the address space.
        seconds: time limit of a job, after which the process is killed; measured by `timer`.
        timer: `signal.ITIMER_REAL`, or `signal.ITIMER_PROF` for processor time.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # stopped by its parent
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    os.nice(_NICE)
    while (job := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(timer, seconds)
        found = answer(job)
        signal.setitimer(timer, 0)
        sys.stdout.buffer.write(_LENGTH.pack(len(found)) + found)
        sys.stdout.buffer.flush()


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(header)[0]) if len(header) == _LENGTH.size else None


def _exchange(process: subprocess.Popen[bytes], job: bytes, seconds: float) -> bytes | None:
    """Return the process's result; None if it exits or times out."""
    assert process.stdin is not None
    assert process.stdout is not None
    reads, writes = process.stdout.fileno(), process.stdin.fileno()
    end, answer = time.monotonic() + seconds, bytearray()
    left = memoryview(_LENGTH.pack(len(job)) + job)
    while (wait := end - time.monotonic()) > 0:
        readable, writable, _ = select.select([reads], [writes] if left else [], [], wait)
        try:
            if writable:
                left = left[os.write(writes, left[: select.PIPE_BUF]) :]
            if readable:
                part = os.read(reads, 1 << 16)
                if not part:
                    return None
                answer += part
        except BrokenPipeError:
            return None
        if len(answer) >= _LENGTH.size + (_LENGTH.unpack_from(answer)[0] if answer else 0):
            return bytes(answer[_LENGTH.size :])
    return None


def _start(module: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # without secrets
        bufsize=0,
        # Keeps terminal signals away. In a separate session niceness could have no effect: Linux
        # may divide CPU time between sessions first (`sched_autogroup_enabled`).
        process_group=0,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()
