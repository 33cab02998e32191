"""Processes for tests that need not load torch: a template has, and forks them.

Where a test is about what a process computes, and not about how it starts, that saves it nearly two
seconds of a core.
"""

import array
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

from engine.executor import team, worker_process
from engine.executor.team import Team
from engine.shared.config import EngineConfig
from engine.shared.lifeline import LIFELINE_VARIABLE
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]

CONNECTION_VARIABLE = "TEST_TEMPLATE_FD"
"""Names the descriptor of a forked process's own connection to the template, if it has one."""

EXIT_CODE = struct.Struct("!i")
"""What the template writes about the end of a process, as `subprocess` has it."""


class Forked:
    """A process that the template has forked; used like a `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], pid: int, end: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._arguments = arguments
        self._end = end

    def poll(self) -> int | None:
        """Return its exit code if it has ended."""
        if self.returncode is None and wait([self._end], 0):
            self._read_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self.returncode is None:
            if not wait([self._end], timeout):
                raise subprocess.TimeoutExpired(self._arguments, timeout or 0.0)
            self._read_end()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _read_end(self) -> None:
        data = os.read(self._end, EXIT_CODE.size)
        assert data, f"the template died before {self._arguments}"
        (self.returncode,) = EXIT_CODE.unpack(data)
        os.close(self._end)


class Template:
    """A connection to the template.

    Args:
        process: the template itself, where this process has started it.
    """

    def __init__(
        self, connection: socket.socket, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self._connection = connection
        self._process = process
        self._lock = threading.Lock()

    @classmethod
    def begin(cls) -> "Template":
        """Start a template; it loads torch while the caller goes on."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.template_main", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # what forks has one thread
                pass_fds=[theirs.fileno()],
            )
        return cls(ours, process)

    def start(
        self,
        module: str,
        *arguments: str,
        descriptors: dict[int, int],
        environment: dict[str, str] | None = None,
        directory: Path | None = None,
    ) -> Forked:
        """Fork a process that calls the `main` of a module.

        Args:
            descriptors: those it has, by their numbers there: also its standard streams.
            environment: its whole environment; default: this process's.
            directory: where it runs; default: as this process.
        """
        end, its_end = os.pipe()
        request = {
            "arguments": [module, *arguments],
            "environment": dict(os.environ) if environment is None else environment,
            "directory": str(directory or Path.cwd()),
            "numbers": list(descriptors),
        }
        try:
            pid = self._ask(request, [its_end, *descriptors.values()])
        finally:
            os.close(its_end)
        return Forked([module, *arguments], pid, end)

    def connect(self) -> socket.socket:
        """Return another connection, for a process that starts some itself."""
        theirs, templates = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with templates:
            self._ask({}, [templates.fileno()])
        return theirs

    def end(self) -> None:
        """Let it end; it does as soon as all that it has forked have."""
        self._connection.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # what is left is a leak of tests
                self._process.wait(PATIENCE)

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> int:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        with self._lock:
            self._connection.sendmsg([json.dumps(request).encode()], [rights])
            answer = self._connection.recv(4096)
        assert answer, "the template has died"
        return int(answer)


_template: Template | None = None


def template() -> Template:
    """Return the template of this process, which is started when it is first asked for."""
    global _template
    if _template is None:
        number = os.environ.pop(CONNECTION_VARIABLE, "")
        _template = Template(socket.socket(fileno=int(number))) if number else Template.begin()
    return _template


def end_template() -> None:
    """End the template if there is one."""
    global _template
    if _template is not None:
        _template.end()
        _template = None


def forked_team(config: EngineConfig, engine: int, engines_on_node: int) -> Team:
    """Return the worker processes of an engine, forked by the template."""

    def start(lifeline: int, commands: int) -> Forked:
        return template().start(
            worker_process.WORKER_MODULE,
            descriptors={1: 1, 2: 2, lifeline: lifeline, commands: commands},
            environment={**os.environ, LIFELINE_VARIABLE: str(lifeline)},
        )

    with mock.patch.object(team, "spawn", start):
        return Team(config, engine, engines_on_node)
