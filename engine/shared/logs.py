"""Logging of every process: one line per event, on standard error, as text or as JSON.

Writes to standard error neither block nor raise, whatever happens to its reader or disk. A line is
written immediately if there is room. Otherwise it waits in a backlog that a thread writes later;
lines that exceed the backlog, or fail to be written, are dropped and counted, and the count is
logged as soon as writing works again.
"""

import atexit
import faulthandler
import io
import logging
import os
import re
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import setproctitle

MAX_BACKLOG = 1 << 20
"""Maximum bytes of the backlog."""

LAST_WORDS_SECONDS = 0.5
"""How long an exiting process waits for its backlog to be written."""

_PAUSE = 0.05
_PIECE = select.PIPE_BUF
"""Maximum bytes per write: a pipe that is writable accepts this many without blocking."""


class LogStream(io.TextIOBase):
    """A non-blocking text file over a descriptor, for log lines; thread-safe."""

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._target, self._flags = _unblocked(descriptor)
        self._lock = threading.RLock()  # a signal handler can log while a line is being written
        self._backlog: deque[bytes] = deque()
        self._waiting = 0
        """Bytes in the backlog."""
        self._dropped = 0
        self._reason = ""
        self._in_line = False
        """Whether the last line was written only in part."""
        self._filled = threading.Event()
        self._ended = False
        # Started now, since there may be no memory for a thread when it is needed.
        threading.Thread(target=self._write_backlog, name="log", daemon=True).start()
        atexit.register(self.wait_until_written, LAST_WORDS_SECONDS)

    # -- text file interface ---------------------------------------------------------------------

    def writable(self) -> bool:
        """Always true; required by io.TextIOBase."""
        return True

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def flush(self) -> None:
        """Do nothing: writes are not buffered, except for the backlog."""

    def close(self) -> None:
        """Drop the backlog and all later writes; the descriptor stays open.

        The thread ends too; if it waits for a reader, once that reader disconnects.
        """
        super().close()
        atexit.unregister(self.wait_until_written)
        with self._lock:
            self._ended = True
        self._filled.set()

    def write(self, text: str) -> int:
        """Write lines now or through the backlog; drop and count them if it is full."""
        data = text.encode(errors="replace")
        with self._lock:
            if not self._backlog and not self._ended:
                data = self._write_now(data)
            if not data or self._ended:
                return len(text)
            if self._waiting + len(data) > MAX_BACKLOG:
                self._drop("they were not read in time")
                return len(text)
            self._backlog.append(data)
            self._waiting += len(data)
        self._filled.set()
        return len(text)

    @property
    def is_written(self) -> bool:
        """Whether the backlog is empty."""
        with self._lock:  # the thread takes lines from the backlog while it writes them
            return not self._backlog

    def wait_until_written(self, seconds: float) -> None:
        """Wait up to `seconds` for the backlog to be written."""
        deadline = time.monotonic() + seconds
        while not self.is_written and time.monotonic() < deadline:
            time.sleep(0.01)

    # -- with the lock held ----------------------------------------------------------------------

    def _write_now(self, data: bytes) -> bytes:
        """Write as much as possible; return the rest. Drops data on errors other than EAGAIN."""
        try:
            if self._dropped and self._has_room():
                start = "\n" if self._in_line else ""
                text = f"{start}[{self._dropped} log lines were lost: {self._reason}]\n"
                self._write_piece(text.encode())
                self._dropped = 0
                self._in_line = False
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

    def _drop(self, reason: str) -> None:
        self._dropped += 1
        self._reason = reason

    def _has_room(self) -> bool:
        if self._target == self._descriptor and not self._flags:
            poll = select.poll()
            poll.register(self._target, select.POLLOUT)
            return bool(poll.poll(0))
        return True  # the write itself fails with EAGAIN

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
                    time.sleep(_PAUSE)  # poll reported it as writable, but it is not
        if self._target != self._descriptor:
            os.close(self._target)


def _unblocked(descriptor: int) -> tuple[int, int]:
    """Return a descriptor of the same file whose writes never block, and flags for sends.

    O_NONBLOCK would affect everyone who shares the open file, so a pipe is reopened instead.
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
    """Open /dev/null on closed descriptors 0 to 2, so that no other file gets these numbers.

    Call before anything else is opened.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)


def guard_standard_error() -> LogStream:
    """Replace `sys.stderr` by a `LogStream`, once, and return it."""
    if not isinstance(sys.stderr, LogStream):
        sys.stderr = LogStream()
    return sys.stderr


LogFormat = Literal["text", "json"]

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""All but tab and line feed; also characters that terminals show as a line break or reorder."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; `extra` values become fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD_FIELDS:
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """Formats a record as a line of text.

    Messages can quote what clients and operators send, such as the name of an adapter: control
    characters are escaped, and further lines indented, so that none looks like another record.
    """

    def __init__(self, process: str) -> None:
        form = f"%(asctime)s.%(msecs)03d %(levelname)-7s [{process}] %(message)s"
        super().__init__(form, "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without an exception."""
        line = _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], super().formatMessage(record))
        return line.replace("\n", "\n    ")


def name_process(name: str, log_level: str, log_format: LogFormat = "text") -> None:
    """Show the process as `swell: NAME` in the process list and set up its logging.

    Afterwards output to standard error cannot block or fail. SIGUSR1 prints the stacks of all
    threads.
    """
    stream = guard_standard_error()
    faulthandler.register(signal.SIGUSR1, stream)
    setproctitle.setproctitle(f"swell: {name}")
    handler = logging.StreamHandler(stream)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(name))
    else:
        handler.setFormatter(TextFormatter(name))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)


class LogLines(io.StringIO):
    """A text file whose lines become log records, for output meant for a terminal."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._rest = ""

    def write(self, text: str) -> int:
        """Log complete lines."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info("%s", line.rstrip())
        return len(text)


def relay_line(source: str, log_format: LogFormat, line: str) -> None:
    """Print a child's output line; in JSON logs, lines that are not JSON become records."""
    if log_format == "text" or line.startswith("{"):
        print(f"{line}\n", end="", file=sys.stderr, flush=True)
    elif line:
        logging.getLogger(__name__).info("%s", line, extra={"source": source})
