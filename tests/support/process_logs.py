"""Output of a test's processes, shown if it fails."""

import os
from collections.abc import Generator, Iterator
from subprocess import Popen
from typing import ClassVar

import pytest

from benchmarks import running_stack

MOST_LINES, MOST_BYTES = 120, 65_536
"""Maximum shown per process, from the end."""


class ProcessLog:
    """An unnamed file for one process's stdout and stderr.

    Args:
        name: name of the process in the report.
    """

    kept: ClassVar[list["ProcessLog"]] = []
    """Logs of processes that run, or have ended during the current test."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.descriptor = os.memfd_create("process-log")
        self.process: Popen[bytes] | None = None
        self.kept.append(self)

    @property
    def text(self) -> str:
        """The end of the output."""
        size = os.fstat(self.descriptor).st_size
        last = os.pread(self.descriptor, MOST_BYTES, max(0, size - MOST_BYTES))
        return last.decode(errors="replace")

    @classmethod
    def forget_ended(cls) -> None:
        """Close the logs of processes that have ended."""
        for each in list(cls.kept):
            if each.process is None or each.process.poll() is not None:
                cls.kept.remove(each)
                os.close(each.descriptor)


def printed(process: "Popen[bytes]") -> str:
    """Return the end of the output of a process started with a log."""
    return next(log.text for log in ProcessLog.kept if log.process is process)


def _logs() -> Iterator[tuple[str, str]]:
    for log in ProcessLog.kept:
        yield log.name, log.text
    for stack in running_stack.started:
        yield stack.name, "\n".join(stack.lines[-MOST_LINES:])


def pytest_runtest_setup() -> None:
    """Drop the processes of earlier tests."""
    ProcessLog.forget_ended()
    for stack in list(running_stack.started):
        if stack.process.poll() is not None:
            running_stack.started.discard(stack)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the output of processes to the report of a failure."""
    report = yield
    if report.failed and item.get_closest_marker("stack") is not None:
        for name, text in _logs():
            lines = "\n".join(text.splitlines()[-MOST_LINES:])
            report.sections.append((f"printed by {name}", lines))
    return report
