"""What a request costs the front end that gets it: memory, and time on its event loop."""

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

_PAGE = 4096
_INTERVAL = 0.004
_PROBE = b"GET /health HTTP/1.1\r\nHost: swell\r\n\r\n"


class Cost(NamedTuple):
    """The most that was seen since the watch began to look."""

    memory: int
    """Bytes by which the process grew, over what it had before."""
    stall: float
    """Seconds of processor time that the event loop's thread spent without answering a probe. Time
    that other processes took from it does not count."""
    silence: float
    """Seconds that the slowest probe took, others' time on the processor included."""


class Watch:
    """Looks at one front-end process from a thread, through a connection of its own.

    Every few milliseconds it reads the process's resident memory and asks `/health`, whose answer
    needs nothing but the event loop. The server must have only this one front end.
    """

    def __init__(self, url: str, pid: int) -> None:
        address = urlsplit(url)
        self._address = (address.hostname or "127.0.0.1", address.port or 80)
        self._statm = Path(f"/proc/{pid}/statm")
        self._thread_time = Path(f"/proc/{pid}/task/{pid}/schedstat")
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._before = self._peak = 0
        self._stall = self._silence = 0.0
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._watch_memory, self._watch_loop)
        ]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(10)

    def resident(self) -> int:
        """Return the process's resident memory in bytes."""
        return int(self._statm.read_text().split()[1]) * _PAGE

    def begin(self) -> None:
        """Forget what was seen; growth counts from here."""
        with self._lock:
            self._before = self._peak = self.resident()
            self._stall = self._silence = 0.0

    def cost(self) -> Cost:
        """Return the most that was seen since `begin`."""
        with self._lock:
            self._peak = max(self._peak, self.resident())
            return Cost(self._peak - self._before, self._stall, self._silence)

    def _watch_memory(self) -> None:
        while not self._stopping.wait(_INTERVAL):
            with self._lock, contextlib.suppress(OSError):
                self._peak = max(self._peak, self.resident())

    def _watch_loop(self) -> None:
        connection = None
        while not self._stopping.wait(_INTERVAL):
            began, used = time.monotonic(), self._processor_time()
            try:
                if connection is None:
                    connection = socket.create_connection(self._address, 30)
                connection.sendall(_PROBE)
                alive = _read_answer(connection)
            except OSError:
                alive = False
            if not alive and connection is not None:
                connection.close()
                connection = None
            with self._lock:
                self._silence = max(self._silence, time.monotonic() - began)
                self._stall = max(self._stall, self._processor_time() - used)
        if connection is not None:
            connection.close()

    def _processor_time(self) -> float:
        try:
            return int(self._thread_time.read_text().split()[0]) / 1e9
        except OSError:
            return 0.0


def _read_answer(connection: socket.socket) -> bool:
    """Read one answer; return whether the connection can be used again."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(4096)
        if not piece:
            return False
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    while len(body) < length:
        piece = connection.recv(4096)
        if not piece:
            return False
        body += piece
    return b"connection: close" not in head.lower()
