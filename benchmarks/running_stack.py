"""Runs a whole `swell serve` for benchmarks and tests: start, wait until ready, load, stop."""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

_SWELL = Path(sys.executable).with_name("swell")
_PROGRAM = "import sys; from server.cli import main; sys.exit(main())"
_READY = re.compile(r"swell is ready after ([\d.]+) s: (https?://\S+)")
_ORPHANS_END_WITHIN = 60.0
"""Seconds within which a process notices that its parent has exited, on a busy machine."""
_NEVER_GIVEN_TO_CONNECTIONS = (2000, 10_000)
"""Below the kernel's ephemeral ports, and those of tests that need consecutive ones."""


started: "weakref.WeakSet[RunningStack]" = weakref.WeakSet()
"""All stacks in use, so that their output can be shown."""


class StackFailed(Exception):
    """The stack did not start or stop properly; the message contains its last output."""


class RunningStack:
    """A `swell serve` process on a free port, as a context manager.

    Args:
        arguments: command-line arguments, a model first; `--port` is added.
        timeout: seconds within which it must be ready.
        command: `serve`, or `api-server` for front ends without engines.
        log: descriptor for stdout and stderr; by default a pipe, read into `lines`.
        interpreter: path of the Python for it and its children.
        program: replaces `swell`, with the same flags; requires a `log`.
        environment: additional variables.
    """

    def __init__(
        self,
        *arguments: str,
        timeout: float = 240.0,
        command: str = "serve",
        log: int | None = None,
        interpreter: Path | None = None,
        program: Path = _SWELL,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.lines: list[str] = []
        self.url = ""
        self.ready_after = 0.0
        """Seconds from the start of the process until it reported being ready."""
        self._arguments = arguments
        self._command = command
        self._timeout = timeout
        self._log = log
        self._program = [str(program)]
        if interpreter is not None:
            self._program = [str(interpreter), "-c", _PROGRAM]
        self._environment = {**os.environ, **(environment or {})}
        self._ready = threading.Event()
        self._started_at = 0.0

    def __enter__(self) -> "RunningStack":
        port = 0 if self._log is None else free_ports()
        # `vllm serve` wants the model first; a port among the flags takes precedence.
        named = bool(self._arguments) and not self._arguments[0].startswith("-")
        model, flags = self._arguments[:named], self._arguments[named:]
        self._started_at = time.monotonic()
        self.process = subprocess.Popen(
            [*self._program, self._command, *model, "--port", str(port), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._log is None else self._log,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        )
        self._reader = threading.Thread(
            target=self._read if self._log is None else self._poll,
            args=() if self._log is None else (f"http://127.0.0.1:{port}",),
            daemon=True,
        )
        self._reader.start()
        started.add(self)
        if not self._ready.wait(self._timeout) or not self.url:
            code = self.process.poll()
            self.kill()
            why = f"not ready within {self._timeout} s" if code is None else f"ended with {code}"
            raise StackFailed(f"{why}:\n{self.output}")
        return self

    def _poll(self, url: str) -> None:
        """Poll until it serves, if its output is not read here."""
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                self.ready_after = time.monotonic() - self._started_at
                self.url = url
                break
            time.sleep(0.05)
        self._ready.set()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if found := _READY.search(line):
                self.ready_after = time.monotonic() - self._started_at
                self.url = found[2]
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        """The last lines of the processes' output."""
        return "\n".join(self.lines[-60:])

    @property
    def name(self) -> str:
        """The command with its flags."""
        return " ".join((self._command, *self._arguments))

    def processes(self) -> dict[str, psutil.Process]:
        """Return the running processes of the stack by title, e.g. `engine 0`."""
        supervisor = psutil.Process(self.process.pid)
        found = {}
        for each in [supervisor, *supervisor.children(recursive=True)]:
            try:
                title = " ".join(each.cmdline()).strip()
            except psutil.Error:
                continue
            if title.startswith("swell: "):
                found[title.removeprefix("swell: ")] = each
        return found

    def cpu_seconds(self) -> float:
        """Return the CPU time used by all processes of the stack."""
        times = [each.cpu_times() for each in self.processes().values()]
        return sum(each.user + each.system for each in times)

    def stop(self, timeout: float = 90.0) -> float:
        """Terminate the stack; return the seconds it took.

        Raises:
            StackFailed: it did not exit in time, or processes are left.
        """
        processes = list(self.processes().values())
        waited_for = [each for each in processes if _parent(each) == self.process.pid]
        started_at = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise StackFailed(f"still running {timeout} s after SIGTERM:\n{self.output}") from None
        seconds = time.monotonic() - started_at
        # The supervisor waits for its children; their children exit by themselves if those were
        # killed.
        remaining = [each for each in waited_for if each.is_running()]
        remaining += psutil.wait_procs(processes, timeout=_ORPHANS_END_WITHIN)[1]
        if remaining:
            raise StackFailed(f"left behind: {remaining}\n{self.output}")
        self._close()
        return seconds

    def kill(self) -> None:
        """Kill the supervisor; its children exit by themselves."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self._reader.join(_ORPHANS_END_WITHIN)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.stop()
        self._close()


def swell_bench(url: str, *flags: str, timeout: float = 900.0) -> dict[str, Any]:
    """Load a server with `swell bench`; return its result, including failures.

    Raises:
        StackFailed: nothing could be measured; the message contains its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [str(_SWELL), "bench", "--url", url, "--no-progress", "--output", str(output)]
        done = subprocess.run(
            [*command, *flags], capture_output=True, text=True, timeout=timeout, check=False
        )
        if not output.is_file() or not output.stat().st_size:
            raise StackFailed(f"swell bench ended with {done.returncode}:\n{done.stderr}")
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return result


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def free_ports(count: int = 1) -> int:
    """Return the first of consecutive ports that no connection takes before a stack listens."""
    lowest, highest = _NEVER_GIVEN_TO_CONNECTIONS
    while True:
        first = random.SystemRandom().randrange(lowest, highest - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
