"""A process that a template has forked and the kernel has given to this one as its child."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

_SET_CHILD_SUBREAPER = 36


def can_fork() -> bool:
    """Whether this system gives orphans to a process that asks for them, and has descriptors."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel
        return False
    return True


@contextlib.contextmanager
def taking_in_orphans() -> Iterator[None]:
    """Have descendants whose parent ends become children of this process meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class ForkedProcess:
    """What `server.fleet.child` needs of a process, for one that no `exec` of ours has started."""

    def __init__(self, pid: int) -> None:
        """Watch a child of this process, within an event loop.

        Raises:
            OSError: it is none, or there is no descriptor left.
        """
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: asyncio.StreamReader | None = None
        self._descriptor = os.pidfd_open(pid)
        self._over = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    async def read_from(self, descriptor: int, limit: int) -> None:
        """Have `stdout` read the end of a pipe, which is this object's from now on."""
        reader = asyncio.StreamReader(limit)
        self.stdout = reader
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )

    async def wait(self) -> int:
        """Return the exit code once it has ended."""
        await self._over.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signum)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._over.set()
