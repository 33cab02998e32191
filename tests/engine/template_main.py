"""The template of `tests.engine.template`: loads torch, then forks whatever is asked for."""

import array
import contextlib
import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any, NamedTuple

from engine.executor.environment import settle_environment
from tests.engine.template import EXIT_CODE

_PRELOADED = ("engine.executor.worker", "engine.executor.multi_process", "tests.engine.driver")
_LONGEST_REQUEST, _MOST_DESCRIPTORS = 1 << 20, 16
_FREE_NUMBERS = 512
"""Descriptors from here on are nobody's, while those that were received get their numbers."""


class Wish(NamedTuple):
    """A process that is asked for."""

    request: dict[str, Any]
    descriptors: list[int]


class Forker:
    """Forks for all that are connected, and tells them of the ends of what it has forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._ends: dict[int, int] = {}
        """Where to write the exit code of each process."""
        self._connections = {connection}
        self._woken, self._waker = socket.socketpair()
        for each in (self._woken, self._waker):
            each.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        for readable in (connection, self._woken):
            self._selector.register(readable, selectors.EVENT_READ)

    def run(self) -> Wish | None:
        """Fork until nobody is connected and all have ended; in what is forked, return at once."""
        while self._connections or self._ends:
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._woken:
                    self._reap()
                elif (wish := self._listen(key.fileobj)) is not None:
                    return wish
        return None

    def _listen(self, connection: socket.socket) -> Wish | None:
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        data, rights, _, _ = connection.recvmsg(_LONGEST_REQUEST, space)
        if not data:
            self._selector.unregister(connection)
            self._connections.remove(connection)
            connection.close()
            return None
        received = array.array("i")
        for _, _, each in rights:
            received.frombytes(each)
        request, descriptors = json.loads(data), list(received)
        if not request:
            other = socket.socket(fileno=descriptors[0])
            self._selector.register(other, selectors.EVENT_READ)
            self._connections.add(other)
            connection.send(b"0")
            return None
        end, *given = descriptors
        pid = os.fork()
        if not pid:
            os.close(end)
            self._forget()
            return Wish(request, given)
        self._ends[pid] = end
        for descriptor in given:
            os.close(descriptor)
        connection.send(b"%d" % pid)
        return None

    def _reap(self) -> None:
        self._woken.recv(4096)
        while self._ends:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            end = self._ends.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # who asked for it has ended
                os.write(end, EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))
            os.close(end)

    def _forget(self) -> None:
        """Let go of all that is the template's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for each in (*self._connections, self._woken, self._waker):
            each.close()
        for end in self._ends.values():
            os.close(end)


def become(wish: Wish) -> str:
    """Make this process what is wished for; return the module that it is to run."""
    request = wish.request
    os.setsid()
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, _FREE_NUMBERS) for each in wish.descriptors]
    for each in wish.descriptors:
        os.close(each)
    for each, number in zip(moved, request["numbers"], strict=True):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv = request["arguments"]
    return sys.argv[0]


def main() -> None:
    """Serve, and be what was forked."""
    settle_environment()
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    forker = Forker(socket.socket(fileno=int(sys.argv[1])))
    wish = forker.run()
    if wish is not None:
        sys.exit(importlib.import_module(become(wish)).main())


if __name__ == "__main__":
    main()
