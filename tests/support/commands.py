"""The `swell` command, run as people run it."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import port_of_a_coordinator
from tests.support.process_logs import ProcessLog
from tests.support.waiting import PATIENCE

SWELL = str(Path(sys.executable).with_name("swell"))
"""The path of the installed command."""


def run_swell(*arguments: str, timeout: float = 3 * PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        [SWELL, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def start_swell(*arguments: str) -> "subprocess.Popen[bytes]":
    """Start a command; what it prints is shown if the test fails."""
    log = ProcessLog(" ".join(arguments))
    log.process = subprocess.Popen(
        [SWELL, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log.descriptor,
        stderr=subprocess.STDOUT,
    )
    return log.process


def end_processes(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ask processes to end, those started last first, and kill those that do not."""
    for process in reversed(processes):
        process.terminate()
    for process in processes:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def swell(*arguments: str, ends_within: float = PATIENCE) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command that has to end in order when it is asked to, unless it has ended before."""
    process = start_swell(*arguments)
    try:
        yield process
        process.terminate()
        assert process.wait(ends_within) == 0
    finally:
        process.kill()
        process.wait()


@contextmanager
def coordinator(directory: Path, *flags: str, host: str = "127.0.0.1") -> Iterator[tuple[str, ...]]:
    """Run a coordinator on TCP; the flags with which others find it.

    It listens on four ports from the one that is named there on; the next one answers its probes.

    Args:
        directory: where the key of the cluster is kept.
        flags: of the coordinator and of all who join it.
    """
    key = directory / "cluster.key"
    key.write_text("a secret of these tests")
    port = port_of_a_coordinator()
    join = ("--coordinator", f"{host}:{port}", "--cluster-key-file", str(key), *flags)
    with swell("coordinator", *join, "--health-port", str(port + 4)):
        yield join
