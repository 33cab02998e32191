"""One child process: starts, follows and stops it. Policy is the supervisor's."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from engine.shared.lifeline import LIFELINE_VARIABLE, FrameReader, pack_frame
from engine.shared.messages import ChildStatus
from server.fleet.holder import Ended, Program, ended

logger = logging.getLogger(__name__)

_KEPT_LOG_LINES = 30
LONGEST_LOG_LINE = 1 << 16


class Process(Protocol):
    """What is needed of a child process: `asyncio.subprocess.Process` has it."""

    stdout: asyncio.StreamReader | None

    @property
    def pid(self) -> int:
        """Its id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative: the signal; None while it runs."""

    async def wait(self) -> int:
        """Return the exit code once it has ended."""

    def send_signal(self, signal: int) -> None:
        """Send it a signal."""


class Child:
    """A running Python module of this project with its lifeline and captured log: a `Holder`."""

    node = ""

    def __init__(self, name: str, process: Process, ours: socket.socket) -> None:
        self.name = name
        self.pid = process.pid
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LOG_LINES)
        self._process = process
        self._lifeline = ours
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        program: Program,
        *,
        on_status: Callable[[ChildStatus], None],
        on_line: Callable[[str], None],
    ) -> "Child":
        """Run a program and hand it its launch parameters over its lifeline: a `Starter`.

        Args:
            on_status: called for every status the child reports.
            on_line: called for every line that the child prints.

        Raises:
            OSError: the process cannot be created (no interpreter, memory or process id).
        """
        ours, theirs = socket.socketpair()
        variables = {**os.environ, **program.environment, LIFELINE_VARIABLE: str(theirs.fileno())}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                program.module,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
                pass_fds=[theirs.fileno(), *program.inherit],
                # Signals from the terminal go to the supervisor, which stops children in order.
                start_new_session=True,
                limit=LONGEST_LOG_LINE,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child = cls(program.name, process, ours)
        child.follow(program.launch, on_status, on_line)
        return child

    def follow(
        self,
        launch: Any,
        on_status: Callable[[ChildStatus], None],
        on_line: Callable[[str], None],
    ) -> None:
        """Hand the process its launch parameters, and pass on what it reports and prints."""
        self._lifeline.setblocking(False)
        self._tasks = [
            asyncio.create_task(self._hand_over(pack_frame(launch))),
            asyncio.create_task(self._read_status(on_status)),
            asyncio.create_task(self._read_log(on_line)),
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
            except Exception:  # a pipe that nobody drains stops the child
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
        """End the process at once."""
        self._signal(signal.SIGKILL)

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
    waits for ever if there is no memory for it.
    """
    if sys.version_info >= (3, 12):
        return
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel
        return
    asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
