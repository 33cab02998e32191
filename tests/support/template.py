"""Preloads libraries for test processes, then forks them (see `tests.support.forking`)."""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import setproctitle

from engine.executor.environment import configure_environment
from engine.shared.template import fork_orphan
from tests.support.forking import FREE_NUMBERS, PARENTS, SWELL, ProgramRequest, connect_to_template

_PRELOADED = (
    "coordinator.process",
    "engine.executor.encoding",
    "engine.executor.in_process",
    "engine.executor.simulated",
    "engine.executor.worker",
    "engine.process.main",
    "numba",  # without kernels, for whose target each process reads its own variables
    "scipy.linalg",  # which Numba's first kernel loads
    "server.cli",
    "server.fleet.supervisor",
    "server.front_end",
    "tests.engine.driver",
)
_LONGEST_WISH, _MOST_DESCRIPTORS = 1 << 20, 64
_MANY = 1 << 20


def _serve(connection: socket.socket) -> tuple[ProgramRequest, Sequence[int]] | None:
    """Fork on request until disconnected; in a forked process, return the process to become."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_WISH, _MOST_DESCRIPTORS)
        if not data:
            return None
        pid = fork_orphan()
        if not pid:
            connection.close()
            return ProgramRequest(*json.loads(data)), descriptors
        connection.send(b"%d" % pid if pid > 0 else b"")
        for each in descriptors:
            os.close(each)


def _become(request: ProgramRequest, descriptors: Sequence[int]) -> None:
    """Set up this process as requested."""
    if request.new_session:
        os.setsid()
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, FREE_NUMBERS) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(moved, request.numbers, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    _customize(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[:] = request.arguments
    module = [] if request.program == "swell" else [sys.executable, "-m"]
    setproctitle.setproctitle(" ".join([*module, *request.arguments]))


def _customize(folders: Sequence[str]) -> None:
    """Add folders of PYTHONPATH that the template lacked, and run their `sitecustomize`."""
    added = [each for each in folders if each and each not in sys.path]
    sys.path[1:1] = added
    for each in added:
        if (program := Path(each) / "sitecustomize.py").exists():
            runpy.run_path(str(program))


def _run(program: str) -> int:
    """Run a program like the interpreter does; return its exit code."""
    try:
        if program == "swell":
            runpy.run_path(SWELL, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Exit immediately: tearing down the loaded modules would cost as much as loading them."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    """Serve requests, and run the program in forked processes."""
    setproctitle.setproctitle("swell tests: template")  # while it can still find the title memory
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` is meant for the tests only
    configure_environment(_MANY)  # selects libgomp: a forked LLVM runtime leaves files behind
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    connection = socket.socket(fileno=int(sys.argv[1]))
    while (forked := _serve(connection)) is not None:
        request, descriptors = forked
        if request.program in PARENTS or request.program.startswith("tests."):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if not os.fork():
                ours.close()
                for each in descriptors:
                    os.close(each)
                connection = theirs
                continue  # as the template for that process's own children
            theirs.close()
            with ours:
                number = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, FREE_NUMBERS)
            connect_to_template(socket.socket(fileno=number))
        _become(request, descriptors)
        code = _run(request.program)
        getattr(threading, "_shutdown")()  # noqa: B009  # not in its stubs
        _end(code)
    _end(0)


if __name__ == "__main__":
    main()
