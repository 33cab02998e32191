"""Logging of every process: one line per event, on standard error, as text or as JSON."""

import faulthandler
import io
import logging
import signal
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import setproctitle

from engine.shared.log_stream import guard_standard_error

LogFormat = Literal["text", "json"]

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object; what a caller gives as `extra` becomes fields of it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
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


def name_process(name: str, log_level: str, log_format: LogFormat = "text") -> None:
    """Show the process as `swell: NAME` in the process list and set up its logging.

    From then on nothing that the process prints on standard error can stop it. SIGUSR1 makes it
    print where all of its threads are.
    """
    stream = guard_standard_error()
    faulthandler.register(signal.SIGUSR1, stream)
    setproctitle.setproctitle(f"swell: {name}")
    handler = logging.StreamHandler(stream)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(name))
    else:
        form = f"%(asctime)s.%(msecs)03d %(levelname)-7s [{name}] %(message)s"
        handler.setFormatter(logging.Formatter(form, "%H:%M:%S"))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)


class LogLines(io.StringIO):
    """A text file whose lines become log records: for output that a terminal would show."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._rest = ""

    def write(self, text: str) -> int:
        """Log the lines that are complete."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info("%s", line.rstrip())
        return len(text)


def relay_line(source: str, log_format: LogFormat, line: str) -> None:
    """Show an output line of a child; in a JSON log, what is no JSON yet becomes a record."""
    if log_format == "text" or line.startswith("{"):
        print(f"{line}\n", end="", file=sys.stderr, flush=True)
    elif line:
        logging.getLogger(__name__).info("%s", line, extra={"source": source})
