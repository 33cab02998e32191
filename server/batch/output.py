"""The output file of a batch: written line by line, taken up again after whatever ended a run."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from engine.shared.writable import writable_file
from server.batch.lines import BatchResult, read_result, write_result


class OutputBusy(Exception):
    """Another run writes to the file."""


class OutputFile:
    """Appends results, as a context manager.

    A line is written at once and whole, so that at most the last one can be damaged. When a file is
    taken up again, damaged lines and those that another try may change (no answer, server busy or
    failing) are removed; `answered` names the rest.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.answered: set[str] = set()
        self.num_refused = 0
        """How many of those are no successes."""

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
        return self

    def append(self, result: BatchResult) -> None:
        """Write a line."""
        line = write_result(result)
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self._path}: no space is left")

    def _locked(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise OutputBusy(f"another run writes to {self._path}") from error
        return file

    def _read(self) -> tuple[list[bytes], int]:
        kept, dropped = [], 0
        with self._path.open("rb") as lines:
            for line in lines:
                result = read_result(line)
                if result is None or not result.final or result.custom_id is None:
                    dropped += 1
                    continue
                kept.append(line)
                self.answered.add(result.custom_id)
                self.num_refused += not result.succeeded
        return kept, dropped

    def _replace(self, lines: list[bytes]) -> None:
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
