"""The output file of a batch: written line by line, taken up again after whatever ended a run."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from engine.shared.writable import writable_file
from server.batch.lines import (
    Attempt,
    BadLine,
    BatchResult,
    new_id,
    read_result,
    write_result,
)


class OutputBusy(Exception):
    """Another run writes to the file."""


class OutputFile:
    """Takes results, as a context manager, and is put into the order of the input at the end.

    A line is written at once and whole, so that at most the last one can be damaged. When a file is
    taken up again, damaged lines and those that another try may change (no answer, server busy or
    failing) are removed; `answered` names the rest.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.answered: dict[str, int] = {}
        """Where in the file the line of each request begins."""

    def __enter__(self) -> "OutputFile":
        """Open the file.

        Raises:
            OutputBusy: another run writes to it.
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
        """Write a line."""
        line = write_result(result)
        begin = os.fstat(self._file).st_size
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self._path}: no space is left")
        if result.custom_id is not None:
            self.answered[result.custom_id] = begin

    def order(self, attempts: Iterable[Attempt]) -> None:
        """Put the lines into the order of what they answer, and say what is wrong with the rest.

        Answers to other requests, as of an earlier run with more of them, stay behind these.

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
        """Put a file with these lines in place of the present one, in one step."""
        beside = self._path.with_name(self._path.name + ".new")
        with beside.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        os.close(self._file)
        self._file = self._locked()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.fsync(self._file)
        os.close(self._file)
