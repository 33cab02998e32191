"""Forks the processes that tests start from a template with preloaded libraries.

Loading torch and the HTTP stack takes a process about two seconds of CPU time, and tests start
hundreds. So `subprocess`, in this process and in processes that start others themselves, uses a
template (`tests.support.template`) instead of fork and exec to run the `swell` command or a Python
module of `FORKED`. The result is an ordinary child of this process: with its own descriptors,
environment, directory and exit code.

Forked processes share a hash seed, and libraries have read the template's environment at import.
Tests about process startup use the fixture `started_anew`.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import Popen  # some tests replace this class
from typing import Any, NamedTuple
from unittest import mock

from server.fleet.forking import adopting_orphans

ROOT = Path(__file__).parents[2]
SWELL = str(Path(sys.executable).with_name("swell"))
FORKED = frozenset(
    (
        "coordinator",
        "engine",
        "engine.executor.worker_main",
        "engine.template_main",
        "server",
        "server.template_main",
    )
)
"""Modules that production code runs as processes, and that are forked here."""
PARENTS = frozenset(("engine", "swell"))
"""Programs that start such processes themselves."""
FREE_NUMBERS = 512
"""First descriptor number for internal use, above those that tests' processes use."""

_SETTLED_BY_EXEC = ("PYTHON", "LD_")
"""Prefixes of variables that are read at exec, so that a fork cannot apply them."""
_LONGEST_ANSWER = 64


class ProgramRequest(NamedTuple):
    """A requested process."""

    program: str
    """A module, or `swell`."""
    arguments: Sequence[str]
    """Its `sys.argv`."""
    environment: dict[str, str]
    directory: str
    new_session: bool
    numbers: Sequence[int]
    """Descriptor numbers in the process, in the order in which they are sent."""


class ForkExec:
    """Replaces the function of the same name that `subprocess` calls.

    Args:
        connection: to a template; by default, one is started on first use.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._connection = connection
        self._template: Popen[bytes] | None = None
        self._exec = getattr(subprocess, "_fork_exec")  # noqa: B009  # not in its stubs
        self._lock = threading.Lock()
        self._settled = _settled(os.environ)
        self.is_active = True

    def __call__(
        self,
        arguments: Sequence[Any],
        executables: Sequence[bytes],
        close_others: bool,
        kept: Sequence[int],
        directory: Any,
        environment: Sequence[bytes] | None,
        *rest: Any,
    ) -> int:
        """Start a process; return its id."""
        program = _program([os.fsdecode(each) for each in arguments])
        variables = dict(os.environ)
        if environment is not None:
            variables = dict(os.fsdecode(each).split("=", 1) for each in environment)
        fits = program and self.is_active and close_others and _settled(variables) == self._settled
        if not fits:
            pid: int = self._exec(
                arguments, executables, close_others, kept, directory, environment, *rest
            )
            return pid
        stdin, _, _, stdout, _, stderr, _, own, _, new_session, *_ = rest
        numbers = {0: stdin, 1: stdout, 2: stderr}
        descriptors = {n: n if each < 0 else each for n, each in numbers.items()}
        descriptors |= {each: each for each in kept if each != own}
        request = ProgramRequest(
            program,
            _arguments_of(program, [os.fsdecode(each) for each in arguments]),
            variables,
            os.fsdecode(directory or Path.cwd()),
            new_session,
            list(descriptors),
        )
        return self._ask(request, list(descriptors.values()))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Start processes normally within the block."""
        self.is_active, before = False, self.is_active
        try:
            yield
        finally:
            self.is_active = before

    def end(self) -> None:
        """Stop the template, if it was started here."""
        if self._connection is not None and self._template is not None:
            self._connection.close()
            self._template.wait()

    def _ask(self, request: ProgramRequest, descriptors: list[int]) -> int:
        with self._lock:
            if self._connection is None:
                self._connection, self._template = _begin()
            # The template exits the intermediate process, so that the new one is adopted by the
            # nearest subreaper.
            try:
                with adopting_orphans():
                    socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
                    answer = self._connection.recv(_LONGEST_ANSWER)
            except BaseException:  # e.g. of a signal handler: the answer would be the next one's
                self._connection.close()
                self._connection = None
                raise
        if not answer:
            raise OSError("the template has died, or could not fork")
        return int(answer)


def _program(arguments: Sequence[str]) -> str:
    """Return the forkable program of a command line, or ""."""
    if arguments[0] == SWELL:
        return "swell"
    flags = [each for each in arguments[1:3] if each in ("-P", "-m")]
    if arguments[0] != sys.executable or "-m" not in flags:
        return ""
    module = arguments[1 + len(flags)]
    return module if module in FORKED or module.startswith("tests.engine.") else ""


def _arguments_of(program: str, arguments: list[str]) -> list[str]:
    """Return the program's `sys.argv`."""
    return arguments if program == "swell" else arguments[arguments.index("-m") + 1 :]


def _settled(environment: Any) -> dict[str, str]:
    settled = {k: v for k, v in environment.items() if k.startswith(_SETTLED_BY_EXEC)}
    # The template handles the first; neither it nor forks need the second.
    return {k: v for k, v in settled.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}


def _begin() -> tuple[socket.socket, "Popen[bytes]"]:
    # The command line sets this one, also if a test calls it in this process.
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = Popen(
            [sys.executable, "-m", "tests.support.template", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**variables, "OPENBLAS_NUM_THREADS": "1"},  # forks are single-threaded
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours, process


def connect_to_template(connection: socket.socket) -> None:
    """Make this process use the template at the other end of a connection."""
    setattr(subprocess, "_fork_exec", ForkExec(connection))  # noqa: B010


@contextlib.contextmanager
def forking() -> Iterator[ForkExec]:
    """Fork processes that are started within the block."""
    fork_exec = ForkExec()
    if sys.platform != "linux":
        fork_exec.is_active = False
    with mock.patch.object(subprocess, "_fork_exec", fork_exec):
        try:
            yield fork_exec
        finally:
            fork_exec.end()
