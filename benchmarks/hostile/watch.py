"""Measures the cost of requests to a front end: memory, and time that its event loop is blocked.

A separate process measures, so that the attacker's work is not included: `python -m
benchmarks.hostile.watch PID HOST PORT` prints `ready`, and answers each line on its input, `begin`
or `cost`, with a line of JSON.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import NamedTuple

from benchmarks.hostile.connections import address_of, complete

_PAGE = os.sysconf("SC_PAGE_SIZE")
_INTERVAL = 0.004
"""Seconds between samples of the memory, and between probes of the loop."""
_PATIENCE = 30.0
_PROBE = b"GET /health HTTP/1.1\r\nHost: swell\r\n\r\n"


class Cost(NamedTuple):
    """Maxima observed since the watch began."""

    memory: int = 0
    """Bytes by which the process grew."""
    stall: float = 0.0
    """Duration of the slowest probe in seconds, minus the time that the loop's thread and the probe
    waited for a CPU."""
    silence: float = 0.0
    """Duration of the slowest probe in seconds, including waits for a CPU."""


class Watch:
    """Observes a front-end process from a separate process, over its own connection.

    Every few milliseconds it reads the process's resident memory and requests `/health`, which
    needs only the event loop. The server must have only this one front end.
    """

    def __init__(self, url: str, pid: int) -> None:
        host_port = map(str, address_of(url))
        self._command = [sys.executable, "-m", "benchmarks.hostile.watch", str(pid), *host_port]

    def __enter__(self) -> "Watch":
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._heard()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=_PATIENCE)

    def begin(self) -> None:
        """Reset the maxima; growth counts from here."""
        self._ask("begin")

    def cost(self) -> Cost:
        """Return the maxima since `begin`, including the requests sent last."""
        return Cost(*json.loads(self._ask("cost")))

    def _ask(self, what: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError("the process that watches has ended")
        return line


# -- the watching process ------------------------------------------------------------------------


class _Watcher:
    """Two sampling threads, and the maxima that they observed."""

    def __init__(self, pid: int, address: tuple[str, int]) -> None:
        self._pid, self._address = pid, address
        self._changed = threading.Condition()
        self._probes = 0
        self._before = self._peak = self._resident()
        self._stall = self._silence = 0.0
        for target in (self._watch_memory, self._watch_loop):
            threading.Thread(target=target, daemon=True).start()

    def begin(self) -> None:
        self._after_two_probes()
        with self._changed:
            self._before = self._peak = self._resident()
            self._stall = self._silence = 0.0

    def cost(self) -> Cost:
        self._after_two_probes()
        with self._changed:
            return Cost(self._peak - self._before, self._stall, self._silence)

    def _after_two_probes(self) -> None:
        """Wait for a probe that begins after this call, when earlier requests have been
        processed."""
        with self._changed:
            due = self._probes + 2
            self._changed.wait_for(lambda: self._probes >= due, _PATIENCE)

    def _resident(self) -> int:
        try:
            with open(f"/proc/{self._pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * _PAGE
        except OSError:
            return 0

    def _watch_memory(self) -> None:
        while True:
            with self._changed:
                self._peak = max(self._peak, self._resident())
            time.sleep(_INTERVAL)

    def _watch_loop(self) -> None:
        connection: socket.socket | None = None
        threads = f"{self._pid}/task/{self._pid}", "thread-self"
        while True:
            started_at, waited = time.monotonic(), processor_waits(*threads)
            alive = False
            with contextlib.suppress(OSError):
                connection = connection or socket.create_connection(self._address, _PATIENCE)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(_PROBE)
                alive = _read_answer(connection)
            if not alive and connection is not None:
                connection.close()
                connection = None
            seconds, waited = time.monotonic() - started_at, processor_waits(*threads) - waited
            with self._changed:
                self._probes += 1
                self._silence = max(self._silence, seconds)
                self._stall = max(self._stall, seconds - waited)
                self._changed.notify_all()
            time.sleep(_INTERVAL)


def processor_waits(*threads: str) -> float:
    """Return the seconds that threads, named by paths below /proc, waited for a CPU."""
    waited = 0
    for thread in threads:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{thread}/schedstat", encoding="ascii") as file,
        ):
            waited += int(file.read().split()[1])
    return waited / 1e9


def _read_answer(connection: socket.socket) -> bool:
    """Read one answer; return whether the connection can be reused."""
    data = b""
    while not complete(data):
        piece = connection.recv(4096)
        if not piece:
            return False
        data += piece
    return b"connection: close" not in data.partition(b"\r\n\r\n")[0].lower()


def _main(pid: int, host: str, port: int) -> None:
    watcher = _Watcher(pid, (host, port))
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "begin\n":
            watcher.begin()
            print("begun", flush=True)
        else:
            print(json.dumps(watcher.cost()), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
