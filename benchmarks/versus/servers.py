"""The servers that are compared, started and stopped the same way."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil

from server.fleet.own_server import stop_process

START_SECONDS = 300
STOP_SECONDS = 30
_LAST_LINES = 40
_PR_SET_PDEATHSIG = 1
_KV_BYTES = 2 << 30
MAX_MODEL_LEN = 2048
MODEL_NAME = "bench"
"""The name of the model in requests."""


class ServerFailed(Exception):
    """A server did not start; the message holds the end of its output."""


class ServerCommand(NamedTuple):
    """How to start one side."""

    arguments: list[str]
    environment: dict[str, str]
    ready_path: str
    """Answers 200 as soon as requests would be served."""


def swell_command(
    model: Path, engines: int, port: int, *, quantization: str | None, extra: list[str]
) -> ServerCommand:
    """Return the command line of `swell serve` beside the running interpreter."""
    arguments = [
        str(Path(sys.executable).with_name("swell")), "serve", str(model),
        "--served-model-name", MODEL_NAME,
        "--host", "127.0.0.1", "--port", str(port),
        "--data-parallel-size", str(engines),
        "--max-model-len", str(MAX_MODEL_LEN),
        "--kv-cache-memory-bytes", str(_KV_BYTES),
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    if quantization is not None:
        arguments += ["--quantization", quantization]
    return ServerCommand([*arguments, *extra], {}, "/ready")


def peer_command(
    python: Path, model: Path, engines: int, port: int, *, extra: list[str]
) -> ServerCommand:
    """Return the command line of `vllm serve` of another environment, tuned for all cores."""
    arguments = [
        str(python.with_name("vllm")), "serve", str(model),
        "--served-model-name", MODEL_NAME,
        "--host", "127.0.0.1", "--port", str(port),
        "--data-parallel-size", str(engines),
        "--max-model-len", str(MAX_MODEL_LEN),
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": _thread_binding(engines),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_BYTES >> 30),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return ServerCommand([*arguments, *extra], environment, "/health")


def _thread_binding(engines: int) -> str:
    """Return equal shares of the cores, e.g. `0-1` for one engine and `0|1` for two."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // engines)
    parts = [cores[first : first + share] for first in range(0, share * engines, share)]
    return "|".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RunningServer:
    """A server process and all its children, as a context manager: ready inside, gone after.

    Raises:
        ServerFailed: it ended, or was not ready within `START_SECONDS`.
    """

    def __init__(self, command: ServerCommand, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.ready_after = 0.0
        self._command = command

    def __enter__(self) -> "RunningServer":
        self._log = tempfile.TemporaryFile(mode="w+")
        began = time.monotonic()
        self._process = subprocess.Popen(
            self._command.arguments,
            env=os.environ | self._command.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            self._await_ready(began + START_SECONDS)
        except BaseException:
            self._end()
            raise
        self.ready_after = time.monotonic() - began
        return self

    def _await_ready(self, deadline: float) -> None:
        while not _answers(self.url + self._command.ready_path):
            if self._process.poll() is not None:
                raise ServerFailed(f"ended with {self._process.returncode}:\n{self._output()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"not ready in {START_SECONDS} s:\n{self._output()}")
            time.sleep(0.25)

    def resident_mb(self) -> float:
        """Return the memory of all processes, what they share counted once."""
        top = psutil.Process(self._process.pid)
        return sum(_proportional_bytes(each) for each in [top, *top.children(recursive=True)]) / 1e6

    def _output(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-_LAST_LINES:])

    def _end(self) -> None:
        """Ask the server to stop, then end whatever of its session is left."""
        children = []
        if self._process.poll() is None:
            children = psutil.Process(self._process.pid).children(recursive=True)
        stop_process(self._process, STOP_SECONDS)
        _, left = psutil.wait_procs(children, timeout=STOP_SECONDS / 3)
        for each in left:
            each.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=STOP_SECONDS)
        self._log.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()


def _end_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent is gone, however that ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _proportional_bytes(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss)
    except psutil.Error:  # it has just ended
        return 0.0
