"""Has processes that tests start forked by a template, which has loaded their libraries.

To load torch and the HTTP stack takes a process about two seconds of a core, and tests start
hundreds. So `subprocess` in this process, and in those that start others themselves, asks a
template (`tests.support.template`) instead of the kernel wherever it is to run a Python module of
`FORKED` or the `swell` command. What it gets is a child of this process as any other: with its own
descriptors, environment, directory and exit code.

Forked processes have the same hash seed, and what libraries read from the environment when they
are loaded is the template's. Tests about how processes start have the fixture `started_anew`.
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
from subprocess import Popen  # also where a test puts another class in its place
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
"""Modules that are run as they are by production, but in a forked process."""
PARENTS = frozenset(("engine", "swell"))
"""What starts such processes itself."""
FREE_NUMBERS = 512
"""Descriptors from here on are nobody's: for what the processes of a test do not know of."""

_SETTLED_BY_EXEC = ("PYTHON", "LD_")
"""Variables whose names begin so are read before a program is: a fork would come too late."""
_LONGEST_ANSWER = 64


class Wish(NamedTuple):
    """A process that is asked for."""

    program: str
    """A module, or `swell`."""
    arguments: Sequence[str]
    """Its `sys.argv`."""
    environment: dict[str, str]
    directory: str
    new_session: bool
    numbers: Sequence[int]
    """Which descriptors it gets: they are sent with the wish, in this order."""


class ForkExec:
    """Takes the place of the function of the same name that `subprocess` calls.

    Args:
        connection: to a template; default: one is started with the first process that needs it.
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
        wish = Wish(
            program,
            _arguments_of(program, [os.fsdecode(each) for each in arguments]),
            variables,
            os.fsdecode(directory or Path.cwd()),
            new_session,
            list(descriptors),
        )
        return self._ask(wish, list(descriptors.values()))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Start processes as `subprocess` does meanwhile."""
        self.is_active, before = False, self.is_active
        try:
            yield
        finally:
            self.is_active = before

    def end(self) -> None:
        """Let the template end that was started."""
        if self._connection is not None and self._template is not None:
            self._connection.close()
            self._template.wait()

    def _ask(self, wish: Wish, descriptors: list[int]) -> int:
        with self._lock:
            if self._connection is None:
                self._connection, self._template = _begin()
            # The template ends the process between itself and the new one, whose parent is then
            # the nearest process above that takes in orphans.
            try:
                with adopting_orphans():
                    socket.send_fds(self._connection, [json.dumps(wish).encode()], descriptors)
                    answer = self._connection.recv(_LONGEST_ANSWER)
            except BaseException:  # of a signal's handler, say: the answer would be the next one's
                self._connection.close()
                self._connection = None
                raise
        if not answer:
            raise OSError("the template has died, or could not fork")
        return int(answer)


def _program(arguments: Sequence[str]) -> str:
    """Return what of a command line can be forked, or nothing."""
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
    # The template looks at the one; forks need the other as little as it does.
    return {k: v for k, v in settled.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}


def _begin() -> tuple[socket.socket, "Popen[bytes]"]:
    # The command line sets the last of these, also where a test calls it in this process.
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = Popen(
            [sys.executable, "-m", "tests.support.template", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**variables, "OPENBLAS_NUM_THREADS": "1"},  # what forks has one thread
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours, process


def fork_from_now_on(connection: socket.socket) -> None:
    """Have this process ask the template at the other end of a connection."""
    setattr(subprocess, "_fork_exec", ForkExec(connection))  # noqa: B010


@contextlib.contextmanager
def forking() -> Iterator[ForkExec]:
    """Have processes forked that are started meanwhile."""
    fork_exec = ForkExec()
    if sys.platform != "linux":
        fork_exec.is_active = False
    with mock.patch.object(subprocess, "_fork_exec", fork_exec):
        try:
            yield fork_exec
        finally:
            fork_exec.end()
