"""Lines of batch files, in OpenAI's format: requests and results."""

import fcntl
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from engine.shared.writable import writable_file

URLS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/pooling",
    "/classify",
)
"""Endpoints that batch requests can use."""


def new_id() -> str:
    """Return an ID for an attempt to answer a line."""
    return f"batch_req_{uuid.uuid4().hex}"


class BatchRequest(msgspec.Struct, frozen=True):
    """One line of an input file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    """JSON of the request's body."""
    method: str = "POST"


class BatchError(msgspec.Struct, frozen=True):
    """Why a request has no response."""

    code: str
    message: str


class BatchResponse(msgspec.Struct, frozen=True):
    """The server's response, success or not."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an output file: either a response or an error."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def outcome(self) -> Literal["answered", "refused", "failed"]:
        """Outcome; only failed requests are worth retrying."""
        status = 503 if self.response is None else self.response.status_code
        if status == 200:
            return "answered"
        return "failed" if status >= 500 or status in (408, 429) else "refused"


class BadLine(ValueError):
    """A line is not a valid request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.error = BatchError(code, message)
        self.custom_id = custom_id


Attempt = BatchRequest | BadLine
"""The parsed form of an input line."""

_encode = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(BatchRequest).decode
_decode_result = msgspec.json.Decoder(BatchResult).decode


def read_request(line: bytes) -> BatchRequest:
    """Parse a line to a request.

    Raises:
        BadLine: it is invalid; the reason names what is wrong.
    """
    try:
        request = _decode_request(line)
    except msgspec.ValidationError as error:
        reason = f"The line is not a valid request: {error}"
        raise BadLine("invalid_request", reason, _name(line)) from error
    except (ValueError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"The line is not valid JSON: {error}") from error
    name = request.custom_id
    if request.method != "POST":
        raise BadLine("invalid_method", f"method: {request.method!r} is not POST", name)
    if request.url not in URLS:
        raise BadLine("invalid_url", f"url: {request.url!r} is none of {', '.join(URLS)}", name)
    if not bytes(request.body).startswith(b"{"):
        raise BadLine("invalid_request", "body: must be an object", name)
    if _field(bytes(request.body), "stream"):
        raise BadLine("invalid_request", "body.stream: a batch cannot be streamed", name)
    return request


def _field(text: bytes, name: str) -> Any:
    try:
        decoded = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return decoded.get(name) if isinstance(decoded, dict) else None


def _name(line: bytes) -> str | None:
    name = _field(line, "custom_id")
    return name if isinstance(name, str) else None


def write_result(result: BatchResult) -> bytes:
    """Return the output line of a result."""
    return _encode(result) + b"\n"


def read_result(line: bytes) -> BatchResult | None:
    """Parse an output line; None if the line is damaged, e.g. by a crash."""
    if not line.endswith(b"\n"):
        return None
    try:
        return _decode_result(line)
    except (ValueError, RecursionError):
        return None


class OutputBusy(Exception):
    """Another run is writing to the file."""


class OutputFile:
    """Output file that collects results, as a context manager, and is finally put in input order.

    Each line is written at once and completely, so only the last one can be damaged. When a run is
    resumed, damaged lines and those worth retrying (no response, server busy or failing) are
    removed; `answered` has the rest.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.answered: dict[str, int] = {}
        """Offset in the file of each answered request's line."""

    def __enter__(self) -> "OutputFile":
        """Open the file.

        Raises:
            OutputBusy: another run is writing to it.
            OSError: it cannot be read or written.
        """
        writable_file(self._path)
        self._file = self._locked()
        kept, dropped = self._read()
        if dropped:
            self._replace(kept)
            self.answered.clear()
            self._read()
        return self

    def append(self, result: BatchResult) -> None:
        """Append a line."""
        line = write_result(result)
        begin = os.fstat(self._file).st_size
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self._path}: no space is left")
        if result.custom_id is not None:
            self.answered[result.custom_id] = begin

    def order(self, attempts: Iterable[Attempt]) -> None:
        """Put the lines in input order, and add errors for requests without an answer.

        Answers to other requests, e.g. of an earlier run with more of them, follow at the end.

        Raises:
            OSError: there is no space for a second file.
        """
        with self._path.open("rb") as written:
            self._replace(self._in_order(attempts, written))

    def _in_order(self, attempts: Iterable[Attempt], written: BinaryIO) -> Iterator[bytes]:
        others = dict(self.answered)
        for attempt in attempts:
            if isinstance(attempt, BadLine):
                yield write_result(
                    BatchResult(id=new_id(), custom_id=attempt.custom_id, error=attempt.error)
                )
            else:
                written.seek(others.pop(attempt.custom_id))
                yield written.readline()
        for begin in others.values():
            written.seek(begin)
            yield written.readline()

    def _locked(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise OutputBusy(f"another run writes to {self._path}") from error
        return file

    def _read(self) -> tuple[list[bytes], int]:
        kept, dropped, begin = [], 0, 0
        with self._path.open("rb") as lines:
            for line in lines:
                result = read_result(line)
                if result is None or result.outcome == "failed" or result.custom_id is None:
                    dropped += 1
                else:
                    kept.append(line)
                    self.answered[result.custom_id] = begin
                begin += len(line)
        return kept, dropped

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Atomically replace the file by one with these lines."""
        beside = self._path.with_name(self._path.name + ".new")
        with beside.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        os.close(self._file)
        self._file = self._locked()

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file)
        os.close(self._file)
