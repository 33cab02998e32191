"""Programs to run, and child processes on this node.

`server.fleet.keeper` decides when to start a program; a `Starter` does it: `Child.start` as a
process of this node, `server.fleet.ray.starter` as an actor of a Ray cluster.
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

RECENT_LOG_LINES = 30
"""Number of recent output lines kept to explain a process's exit."""

MAX_LOG_LINE = 1 << 16
"""Maximum bytes per line of output; longer lines are dropped."""

STACK_DUMP_TIMEOUT = 1.0
"""Seconds that a hung process gets to print its threads' stacks."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program to run in a role."""

    name: str
    """For logs, e.g. `engine 0`."""
    module: str
    """Run as `python -m MODULE`."""
    interpreter: str | None = None
    """Python interpreter; None: the current one."""
    launch: Any
    """A msgspec-encodable object of the type that the module reads from its lifeline."""
    environment: Mapping[str, str] = {}
    """Variables added to the inherited environment."""
    inherit: Sequence[int] = ()
    """File descriptors inherited under the same numbers; on this node only."""
    on_status: Callable[[ChildStatus], None]
    """Called for every status that it reports."""
    on_line: Callable[[str], None]
    """Called for every output line."""


class ProgramExit(NamedTuple):
    """How a program ended."""

    code: int | None
    """Exit code; negative: the signal; None: unknown, as its node was lost."""
    description: str
    """Predicate that follows the program's name in log lines."""


def program_exit(code: int) -> ProgramExit:
    """Describe a process's exit code."""
    if code < 0:
        return ProgramExit(code, f"was ended by {signal.Signals(-code).name}")
    return ProgramExit(code, f"ended with exit code {code}")


class ProgramHandle(Protocol):
    """A running program as seen by the supervisor."""

    @property
    def name(self) -> str:
        """The role's name."""

    @property
    def node(self) -> str:
        """Name of its node; empty: this one, or not known yet."""

    @property
    def last_lines(self) -> Sequence[str]:
        """Recent lines of its output."""

    @property
    def alive(self) -> bool:
        """Whether it has not exited yet."""

    async def wait(self) -> ProgramExit:
        """Wait until it has exited and all of its reports have been read."""

    def terminate(self) -> None:
        """Request an orderly exit."""

    def kill(self) -> None:
        """Kill it."""


Starter = Callable[[Program], Awaitable[ProgramHandle]]
"""Starts a program; raises OSError if that fails."""


class ForkedProcess:
    """A child process forked by a template; like `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        """Watch a child of this process; call from within an event loop.

        Raises:
            OSError: it is not a child, or no descriptor is left.
        """
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: asyncio.StreamReader | None = None
        self._descriptor = os.pidfd_open(pid)
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    async def read_from(self, pipe: BinaryIO) -> None:
        """Make `stdout` read from a pipe, taking ownership of it."""
        reader = asyncio.StreamReader(MAX_LOG_LINE)
        self.stdout = reader
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )

    async def wait(self) -> int:
        """Wait for the exit and return the exit code."""
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has exited."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signum)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._exited.set()


class Child:
    """A child process that runs a Python module of this project, with lifeline and captured
    output."""

    node = ""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process | ForkedProcess,
        lifeline: socket.socket,
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.last_lines: deque[str] = deque(maxlen=RECENT_LOG_LINES)
        self._process = process
        self._lifeline = lifeline
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, program: Program) -> "Child":
        """Start a program and send its launch parameters over its lifeline: a `Starter`.

        Raises:
            OSError: the process cannot be created (no interpreter, memory or process id).
        """
        lifeline, child_end = socket.socketpair()
        variables = {
            **os.environ,
            **program.environment,
            LIFELINE_VARIABLE: str(child_end.fileno()),
        }
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
                pass_fds=[child_end.fileno(), *program.inherit],
                # Signals from the terminal go to the supervisor only, which stops children in
                # order.
                start_new_session=True,
                limit=MAX_LOG_LINE,
            )
        except BaseException:
            lifeline.close()
            raise
        finally:
            child_end.close()
        child = cls(program.name, process, lifeline)
        child.attach(program)
        return child

    def attach(self, program: Program) -> None:
        """Send the launch parameters, and forward status messages and output."""
        self._lifeline.setblocking(False)
        self._tasks = [
            asyncio.create_task(self._send_launch(pack_frame(program.launch))),
            asyncio.create_task(self._read_status(program.on_status)),
            asyncio.create_task(self._read_log(program.on_line)),
        ]

    async def _send_launch(self, launch: bytes) -> None:
        with contextlib.suppress(OSError):  # the exit status will show what was wrong
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
                logger.error("status messages of %s are ignored from now on: %s", self.name, error)
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
            except Exception:  # the pipe must be drained, or the child blocks
                logger.exception("a line of %s cannot be shown", self.name)

    async def wait(self) -> ProgramExit:
        """Wait until the process has exited and its output is read; end what it has started."""
        code = await self._process.wait()
        self._signal_group(signal.SIGTERM)
        # A grandchild may keep the pipe open: its output is not waited for.
        await asyncio.wait(self._tasks, timeout=1.0)
        self._signal_group(signal.SIGKILL)
        for task in self._tasks:
            task.cancel()
        self._lifeline.close()
        return program_exit(code)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its session, which includes its own children such as vLLM's
        workers."""
        if self.alive:
            self._signal_group(signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # none are left, or it has not called setsid
            os.killpg(self.pid, signum)

    async def end_hung(self) -> None:
        """Make it print its threads' stacks, which works even while it hangs, then kill it."""
        self._signal(signal.SIGUSR1)
        await asyncio.sleep(STACK_DUMP_TIMEOUT)
        self.kill()

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal (SIGSTOP, a debugger)."""
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
        """Whether the process is still running."""
        return self._process.returncode is None


def has_pidfds() -> bool:
    """Return whether this is Linux with pidfds, and so with subreapers."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another system, or an old kernel
        return False
    return True


def watch_children_without_threads() -> None:
    """Make this process's event loops watch children through pidfds.

    Python 3.12 and later do so by default. Earlier versions start a thread per child, and wait
    forever if there is no memory for it.
    """
    if sys.version_info < (3, 12) and has_pidfds():
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
