"""The `swell` command, run as users run it."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import port_of_a_coordinator
from tests.support.process_logs import ProcessLog
from tests.support.waiting import PATIENCE

SWELL = str(Path(sys.executable).with_name("swell"))
"""Path of the installed command."""


def run_swell(*arguments: str, timeout: float = 3 * PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run a command that exits by itself."""
    return subprocess.run(
        [SWELL, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def start_swell(*arguments: str) -> "subprocess.Popen[bytes]":
    """Start a command; its output is shown if the test fails."""
    log = ProcessLog(" ".join(arguments))
    log.process = subprocess.Popen(
        [SWELL, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log.descriptor,
        stderr=subprocess.STDOUT,
    )
    return log.process


def end_processes(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Terminate processes in reverse order of start, and kill those that do not exit."""
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
    """Run a command that must exit cleanly when terminated, unless it exits earlier."""
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
    """Run a coordinator on TCP; yield the flags with which others connect to it.

    It listens on four consecutive ports; the next one serves its health probes.

    Args:
        directory: directory for the cluster key.
        flags: flags of the coordinator and of all members.
    """
    key = directory / "cluster.key"
    key.write_text("a secret of these tests")
    port = port_of_a_coordinator()
    join = ("--coordinator", f"{host}:{port}", "--cluster-key-file", str(key), *flags)
    with swell("coordinator", *join, "--health-port", str(port + 4)):
        yield join
