"""A process in a place: what to run there, and how one on this node is started and followed.

`server.fleet.keeper` decides when a place is filled; a `Starter` does it: `Child.start` with a
process of this node, `server.fleet.ray.starter` with an actor of a Ray cluster.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from engine.shared.lifeline import LIFELINE_VARIABLE, FrameReader, pack_frame
from engine.shared.messages import ChildStatus

logger = logging.getLogger(__name__)

KEPT_LOG_LINES = 30
"""The newest lines of a process's output that are kept to explain its end."""

MAX_LOG_LINE = 1 << 16
"""Bytes of one line of output; longer lines are dropped."""

STACKS_WITHIN = 1.0
"""Seconds that a hung process has to print the stacks of its threads."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The program to run in a place."""

    name: str
    """For logs, e.g. `engine 0`."""
    module: str
    """Run as `python -m MODULE`."""
    interpreter: str | None = None
    """The Python that runs it; None: the one that runs here."""
    launch: Any
    """A msgspec-encodable object of the type that the module reads from its lifeline."""
    environment: Mapping[str, str] = {}
    """Variables added to those that it inherits."""
    inherit: Sequence[int] = ()
    """File descriptors that stay open in it, under the same numbers; on this node only."""
    on_status: Callable[[ChildStatus], None]
    """Called for every status that it reports."""
    on_line: Callable[[str], None]
    """Called for every line that it prints."""


class Ended(NamedTuple):
    """How the holder of a place ended."""

    code: int | None
    """Exit code; negative: the signal; None: unknown, as the node was lost with it."""
    how: str
    """For people, after the holder's name."""


def ended(code: int) -> Ended:
    """Return the end of a process with this exit code."""
    if code < 0:
        return Ended(code, f"was ended by {signal.Signals(-code).name}")
    return Ended(code, f"ended with exit code {code}")


class Holder(Protocol):
    """A process that fills a place, as seen from the supervisor."""

    @property
    def name(self) -> str:
        """The place's name."""

    @property
    def node(self) -> str:
        """Name of the node on which it runs; empty: this one, or none yet."""

    @property
    def last_lines(self) -> Sequence[str]:
        """The newest lines that it has printed."""

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""

    async def wait(self) -> Ended:
        """Wait until it has ended and all that it reported has been read."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it at once."""


Starter = Callable[[Program], Awaitable[Holder]]
"""Starts a program for a place; raises OSError if nothing can be started."""


class ForkedProcess:
    """A child of this process that a template has forked, like `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        """Watch a child of this process, within an event loop.

        Raises:
            OSError: it is not a child, or there is no descriptor left.
        """
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: asyncio.StreamReader | None = None
        self._descriptor = os.pidfd_open(pid)
        self._over = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    async def read_from(self, pipe: BinaryIO) -> None:
        """Have `stdout` read from a pipe, which this object owns from now on."""
        reader = asyncio.StreamReader(MAX_LOG_LINE)
        self.stdout = reader
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
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


class Child:
    """A running Python module of this project with its lifeline and captured log: a `Holder`."""

    node = ""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process | ForkedProcess, ours: socket.socket
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.last_lines: deque[str] = deque(maxlen=KEPT_LOG_LINES)
        self._process = process
        self._lifeline = ours
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, program: Program) -> "Child":
        """Run a program and hand it its launch parameters over its lifeline: a `Starter`.

        Raises:
            OSError: the process cannot be created (no interpreter, memory or process id).
        """
        ours, theirs = socket.socketpair()
        variables = {**os.environ, **program.environment, LIFELINE_VARIABLE: str(theirs.fileno())}
        try:
            process = await asyncio.create_subprocess_exec(
                program.interpreter or sys.executable,
                "-P",
                "-m",
                program.module,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
                pass_fds=[theirs.fileno(), *program.inherit],
                # Signals from the terminal go to the supervisor, which stops children in order.
                start_new_session=True,
                limit=MAX_LOG_LINE,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child = cls(program.name, process, ours)
        child.follow(program)
        return child

    def follow(self, program: Program) -> None:
        """Hand the process its launch parameters, and pass on what it reports and prints."""
        self._lifeline.setblocking(False)
        self._tasks = [
            asyncio.create_task(self._hand_over(pack_frame(program.launch))),
            asyncio.create_task(self._read_status(program.on_status)),
            asyncio.create_task(self._read_log(program.on_line)),
        ]

    async def _hand_over(self, launch: bytes) -> None:
        with contextlib.suppress(OSError):  # its end will say what was wrong with it
            await asyncio.get_running_loop().sock_sendall(self._lifeline, launch)

    async def _read_status(self, on_status: Callable[[ChildStatus], None]) -> None:
        reader = FrameReader(ChildStatus)
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(self._lifeline, 65536)
                statuses = reader.feed(data)
            except OSError:
                return
            except msgspec.DecodeError as error:
                logger.error("%s is ignored from now on: %s", self.name, error)
                return
            if not data:
                return
            for status in statuses:
                on_status(status)

    async def _read_log(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                raw = await self._process.stdout.readline()
            except ValueError:  # a line longer than the limit was dropped
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self.last_lines.append(line)
            try:
                on_line(line)
            except Exception:  # an undrained pipe would stop the child
                logger.exception("a line of %s cannot be shown", self.name)

    async def wait(self) -> Ended:
        """Wait until the process has ended and its output is read."""
        code = await self._process.wait()
        # A grandchild may hold the pipe open: its output is not worth waiting for.
        await asyncio.wait(self._tasks, timeout=1.0)
        for task in self._tasks:
            task.cancel()
        self._lifeline.close()
        return ended(code)

    def terminate(self) -> None:
        """Ask the process to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once, and what it has started in its session, as vLLM's workers."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # a fork that has no session yet
                os.killpg(self.pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)

    async def end_hung(self) -> None:
        """Have it print the stacks of its threads, which works even while it hangs, and end it."""
        self._signal(signal.SIGUSR1)
        await asyncio.sleep(STACKS_WITHIN)
        self.kill()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it (SIGSTOP, a debugger)."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def _signal(self, signum: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signum)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.returncode is None


def watch_children_without_threads() -> None:
    """Have the event loops of this process hear of a child's end through a descriptor.

    Later versions of Python do so by themselves. This one starts a thread for each child, and
    waits without end if there is no memory for it.
    """
    if sys.version_info >= (3, 12):
        return
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel
        return
    asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
