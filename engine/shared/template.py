"""A process that preloads libraries and is forked for each process that needs them.

Loading libraries takes most of a process's startup. Processes that start together are therefore
forks of a template: libraries are loaded once, and their pages are shared.

A template does nothing else. It is single-threaded, as a lock held by another thread would stay
locked in a fork forever, and has no sockets but its lifeline and the one for fork requests. It
exits when the latter is closed.
"""

import contextlib
import faulthandler
import gc
import os
import runpy
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import setproctitle

from engine.shared.config import EngineConfig
from engine.shared.lifeline import LIFELINE_VARIABLE, Lifeline

FORK = b"fork"
"""The fork request; sent with the descriptors of a lifeline and of an output."""

MAX_ANSWER_BYTES = 1024
"""Maximum size of a `ForkReply`."""

_THREADS = "OPENBLAS_NUM_THREADS"
"""NumPy's BLAS starts threads at import unless this limits them."""


class TemplateLaunch(msgspec.Struct, frozen=True):
    """Launch parameters that the supervisor sends to a template."""

    name: str
    connection: int
    """Descriptor of the socket (SOCK_SEQPACKET) for fork requests."""
    engine: EngineConfig | None = None
    """Settings of the engines that are forked from it, if they are engines."""


class ForkReply(msgspec.Struct, frozen=True):
    """A template's answer to a fork request."""

    pid: int = 0
    """Of the fork; 0: none was made."""
    refusal: str = ""


def run(module: str, load: Callable[[TemplateLaunch], None]) -> None:
    """Run a template of processes that run `python -m MODULE`; returns in each fork at its end.

    Args:
        load: imports the libraries.
    """
    lifeline = Lifeline.from_environment()
    launch = lifeline.read_launch(TemplateLaunch)
    lifeline.exit_with_supervisor()
    faulthandler.register(signal.SIGUSR1)
    setproctitle.setproctitle(f"swell: {launch.name}")
    connection = socket.socket(fileno=launch.connection)
    gc.disable()  # loaded objects are never garbage
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    load(launch)
    del os.environ[_THREADS]
    if before is not None:
        os.environ[_THREADS] = before
    gc.freeze()
    lifeline.ready("")
    descriptors = _wait_for_fork_requests(connection)
    connection.close()
    lifeline.close()
    _become(descriptors)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _wait_for_fork_requests(connection: socket.socket) -> Sequence[int]:
    """Fork on request until the socket is closed, then exit; in each fork return its
    descriptors."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, len(FORK), 2)
        if not data:
            os._exit(0)
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads == 1:
            pid = fork_orphan()
            if not pid:
                return descriptors
            answer = ForkReply(pid) if pid > 0 else ForkReply(refusal="it cannot be forked")
        else:
            answer = ForkReply(refusal=f"it has {threads} threads")
        for each in descriptors:
            os.close(each)
        with contextlib.suppress(BrokenPipeError):
            connection.send(msgspec.msgpack.encode(answer))


def fork_orphan() -> int:
    """Fork a process that is not a child of this one; return 0 in it, else its pid or -1.

    The intermediate process exits immediately, so that the kernel reparents its child to the
    nearest subreaper.
    """
    reader, writer = os.pipe()
    try:
        between = os.fork()
        if not between:
            os.setsid()  # signals to the template's process group must not reach the fork
            pid = _fork_or_end()
            if not pid:
                return 0
            os.write(writer, b"%d" % pid)
            os._exit(0)
        os.waitpid(between, 0)
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError):
            return int(os.read(reader, 32))
    except OSError:
        pass
    finally:
        os.close(reader)
        os.close(writer)
    return -1


def _fork_or_end() -> int:
    try:
        return os.fork()
    except BaseException:
        os._exit(1)


def _become(descriptors: Sequence[int]) -> None:
    """Set up this process's own lifeline, output and session, as if it had just been started."""
    lifeline, output = descriptors
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ[LIFELINE_VARIABLE] = str(lifeline)
    os.setsid()
    gc.enable()
