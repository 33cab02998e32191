"""Processes that tests start once and then control with one command per line."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
ARGUMENTS: tuple[str, ...] = ()
"""What modules are started with that are given no arguments of their own."""


class Process:
    """One running module that answers lines with lines.

    Args:
        module: its `main` calls `answer_lines`.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._told, self._answers = self._process.stdin, self._process.stdout
        self.was_missed = False
        """Whether a test has failed because this process had died."""

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a command without waiting for the answer."""
        self._told.write(json.dumps([name, *arguments]) + "\n")
        self._told.flush()

    def answer(self) -> dict[str, Any]:
        """Return the oldest answer that was not taken yet."""
        line = self._answers.readline()
        self.was_missed = not line
        assert line, f"the process has died: {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, name: str, *arguments: Any) -> Any:
        """Send a command and return its successful result."""
        self.tell(name, *arguments)
        return self.result()

    def result(self) -> Any:
        """Return the oldest answer, which must be a success."""
        answer = self.answer()
        assert "ok" in answer, answer
        return answer["ok"]

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it, as in a crash."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Stop it and close the pipes."""
        self.kill()
        with contextlib.suppress(BrokenPipeError):  # it died before reading everything
            self._told.close()
        self._answers.close()


class World:
    """Several processes; killed ones are replaced when needed again."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._arguments = arguments or ARGUMENTS
        self._topology = 0
        self.processes: list[Process] = []

    def take(self, count: int) -> list[Process]:
        """Return this many processes without a group."""
        ended = [each for each in self.processes if each.has_ended]
        for each in ended:
            self.kill(each)
        assert all(each.was_missed for each in ended), "one died after its last answer"
        while len(self.processes) < count:
            self.processes.append(Process(self._module, *self._arguments))
        return self.processes[:count]

    def kill(self, process: Process) -> None:
        """Kill one, as in a crash."""
        self.processes.remove(process)
        process.kill()
        process.end()

    def join(self, processes: list[Process], *timeouts: float) -> None:
        """Form a group, in rank order.

        Args:
            timeouts: group timeouts in seconds, by rank, or one for all.
        """
        self._topology += 1
        address, size = free_address(), len(processes)
        of_each = timeouts if len(timeouts) == size else (timeouts or (PATIENCE,)) * size
        for rank, (process, timeout) in enumerate(zip(processes, of_each, strict=True)):
            process.tell("join", address, rank, size, self._topology, timeout)
        for process in processes:
            process.result()

    def all(self, processes: list[Process], name: str, *arguments: Any) -> list[Any]:
        """Send the same command to all at once; return the results by rank."""
        for process in processes:
            process.tell(name, *arguments)
        return [process.result() for process in processes]

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.end()


def free_address() -> str:
    """Return an address with a free port."""
    return f"127.0.0.1:{free_port()}"


def answer_lines(
    member: object, refusals: Mapping[type[Exception], str], *, timed: bool = False
) -> None:
    """Serve commands: answer each line of standard input by calling the method it names.

    Args:
        member: its methods are the commands; arguments and results are JSON.
        refusals: errors returned as answers, by the key of the answer.
        timed: whether answers include their duration in seconds.
    """
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        started_at = time.monotonic()
        answer: dict[str, Any]
        try:
            answer = {"ok": getattr(member, name)(*arguments)}
        except tuple(refusals) as error:
            word = next(word for kind, word in refusals.items() if isinstance(error, kind))
            answer = {word: str(error)}
        if timed:
            answer["seconds"] = time.monotonic() - started_at
        print(json.dumps(answer), flush=True)
