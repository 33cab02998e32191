"""A process that loads what others need and is forked for each of them.

To load the libraries takes most of a process's start. Processes that start together are forks of a
template instead: libraries are loaded once, and what was loaded is the same pages for all of them.

A template does nothing else. It has one thread, as a lock that another thread held would stay
locked in a fork for ever, and no sockets but its lifeline and the one on which it is asked. It ends
when nobody can ask it any more.
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
"""What a template is asked; with it come the descriptors of a lifeline and of an output."""

MAX_ANSWER_BYTES = 1024
"""Maximum size of a `ForkReply`."""

_THREADS = "OPENBLAS_NUM_THREADS"
"""NumPy's library starts threads as it is loaded, unless this says how many."""


class TemplateLaunch(msgspec.Struct, frozen=True):
    """What the supervisor tells a template at its start."""

    name: str
    connection: int
    """Descriptor of the socket (SOCK_SEQPACKET) on which it is asked."""
    engine: EngineConfig | None = None
    """Settings of the engines that are forked from it, where these are engines."""


class ForkReply(msgspec.Struct, frozen=True):
    """What a template says when it is asked."""

    pid: int = 0
    """Of the fork; 0: there is none."""
    refusal: str = ""


def run(module: str, load: Callable[[TemplateLaunch], None]) -> None:
    """Be a template of processes that run `python -m MODULE`; returns in each of them at its end.

    Args:
        load: imports what they need.
    """
    lifeline = Lifeline.from_environment()
    launch = lifeline.read_launch(TemplateLaunch)
    lifeline.end_with_it()
    faulthandler.register(signal.SIGUSR1)
    setproctitle.setproctitle(f"swell: {launch.name}")
    connection = socket.socket(fileno=launch.connection)
    gc.disable()  # what is loaded now is never garbage
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    load(launch)
    del os.environ[_THREADS]
    if before is not None:
        os.environ[_THREADS] = before
    gc.freeze()
    lifeline.ready("")
    descriptors = _fork_when_asked(connection)
    connection.close()
    lifeline.close()
    _become(descriptors)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _fork_when_asked(connection: socket.socket) -> Sequence[int]:
    """Fork until nobody is connected, then end; in each fork return its descriptors."""
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
    """Fork a process that is no child of this one; return 0 in it, here its id, or -1.

    The process between the two ends at once, so that the kernel gives its child to the nearest
    process above that takes in orphans.
    """
    told, tells = os.pipe()
    try:
        between = os.fork()
        if not between:
            os.setsid()  # nothing that ends the group of the process above is meant for the fork
            pid = _fork_or_end()
            if not pid:
                return 0
            os.write(tells, b"%d" % pid)
            os._exit(0)
        os.waitpid(between, 0)
        os.set_blocking(told, False)
        with contextlib.suppress(BlockingIOError):
            return int(os.read(told, 32))
    except OSError:
        pass
    finally:
        os.close(told)
        os.close(tells)
    return -1


def _fork_or_end() -> int:
    try:
        return os.fork()
    except BaseException:
        os._exit(1)


def _become(descriptors: Sequence[int]) -> None:
    """Give this process its own lifeline, output and session, as if it had just been started."""
    lifeline, output = descriptors
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ[LIFELINE_VARIABLE] = str(lifeline)
    os.setsid()
    gc.enable()
