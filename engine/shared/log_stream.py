"""Standard error that neither blocks nor raises, whatever happens to its reader or disk.

A line is written at once where there is room for it. What finds none waits in a backlog that a
thread writes when there is; what the backlog cannot hold, or the disk, is dropped and counted, and
the count is told as soon as writing works again.
"""

import atexit
import io
import os
import select
import socket
import stat
import sys
import threading
import time
from collections import deque

MAX_BACKLOG = 1 << 20
"""Maximum bytes of lines that wait for room."""

LAST_WORDS_SECONDS = 0.5
"""How long a process that ends waits for room for its backlog."""

_PAUSE = 0.05
_PIECE = select.PIPE_BUF
"""Maximum bytes in one write: a pipe that has any room takes this many without blocking."""


class LogStream(io.TextIOBase):
    """A text file in front of a descriptor, for log lines; usable from every thread."""

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._target, self._flags = _unblocked(descriptor)
        self._lock = threading.RLock()  # a signal's handler may log in the midst of a line
        self._backlog: deque[bytes] = deque()
        self._waiting = 0
        """Bytes in the backlog."""
        self._dropped = 0
        self._reason = ""
        self._in_line = False
        """Whether the last line that was begun has been cut off."""
        self._filled = threading.Event()
        self._ended = False
        # Now, as there may be no memory for a thread when it is needed.
        threading.Thread(target=self._write_backlog, name="log", daemon=True).start()
        atexit.register(self.wait_until_written, LAST_WORDS_SECONDS)

    # -- what a text file has --------------------------------------------------------------------

    def writable(self) -> bool:
        """Yes."""
        return True

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def flush(self) -> None:
        """Do nothing: what can be written has been."""

    def close(self) -> None:
        """Drop what is written from now on, and what waits; the descriptor stays its owner's.

        The thread ends with it, or where nobody reads as soon as the reader goes.
        """
        super().close()
        atexit.unregister(self.wait_until_written)
        with self._lock:
            self._ended = True
        self._filled.set()

    def write(self, text: str) -> int:
        """Write whole lines now, or as soon as there is room; or drop them and count."""
        data = text.encode(errors="replace")
        with self._lock:
            if not self._backlog and not self._ended:
                data = self._write_now(data)
            if not data or self._ended:
                return len(text)
            if self._waiting + len(data) > MAX_BACKLOG:
                self._drop("nobody read them in time")
                return len(text)
            self._backlog.append(data)
            self._waiting += len(data)
        self._filled.set()
        return len(text)

    @property
    def is_written(self) -> bool:
        """Whether nothing waits for room."""
        with self._lock:  # what the thread is writing is in nobody's backlog
            return not self._backlog

    def wait_until_written(self, seconds: float) -> None:
        """Wait up to this many seconds for the backlog to be written."""
        deadline = time.monotonic() + seconds
        while not self.is_written and time.monotonic() < deadline:
            time.sleep(0.01)

    # -- below the lock --------------------------------------------------------------------------

    def _write_now(self, data: bytes) -> bytes:
        """Write what there is room for; return the rest. What can never be written is dropped."""
        try:
            if self._dropped and self._has_room():
                self._tell_dropped()
            while data and self._has_room():
                written = self._write_piece(data[:_PIECE])
                self._in_line = not data[:written].endswith(b"\n")
                data = data[written:]
        except BlockingIOError:
            return data
        except OSError as error:
            self._drop(error.strerror or str(error))
            return b""
        return data

    def _tell_dropped(self) -> None:
        start = "\n" if self._in_line else ""
        text = f"{start}[{self._dropped} log lines were lost: {self._reason}]\n"
        self._write_piece(text.encode())
        self._dropped = 0
        self._in_line = False

    def _drop(self, reason: str) -> None:
        self._dropped += 1
        self._reason = reason

    def _has_room(self) -> bool:
        if self._target == self._descriptor and not self._flags:
            poll = select.poll()
            poll.register(self._target, select.POLLOUT)
            return bool(poll.poll(0))
        return True  # a write says itself that there is none

    def _write_piece(self, data: bytes) -> int:
        if self._flags:
            with socket.socket(fileno=os.dup(self._target)) as connection:
                return connection.send(data, self._flags)
        return os.write(self._target, data)

    # -- the thread ------------------------------------------------------------------------------

    def _write_backlog(self) -> None:
        while not self._ended:
            self._filled.wait()
            self._filled.clear()
            while self._backlog and not self._ended:
                poll = select.poll()
                poll.register(self._target, select.POLLOUT)
                poll.poll()
                with self._lock:
                    data = self._backlog.popleft()
                    self._waiting -= len(data)
                    rest = self._write_now(data)
                    if rest:
                        self._backlog.appendleft(rest)
                        self._waiting += len(rest)
                if rest == data:
                    time.sleep(_PAUSE)  # it is not as writable as it says
        if self._target != self._descriptor:
            os.close(self._target)


def _unblocked(descriptor: int) -> tuple[int, int]:
    """Return a descriptor of the same file whose writes never block, and flags of its sends.

    Flags of an open file are shared with everybody who has it: a pipe is opened anew instead.
    """
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISSOCK(mode):
            return descriptor, socket.MSG_DONTWAIT
        if stat.S_ISFIFO(mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK), 0
    except OSError:
        pass
    return descriptor, 0


def open_standard_descriptors() -> None:
    """Fill descriptors 0 to 2 where the caller closed them, so that nothing else gets their place.

    To be called before anything is opened.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)


def guard_standard_error() -> LogStream:
    """Put a `LogStream` in the place of `sys.stderr`, once, and return it."""
    if not isinstance(sys.stderr, LogStream):
        sys.stderr = LogStream()
    return sys.stderr
