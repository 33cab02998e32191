"""A process records which signals ask it to end."""

import signal
import subprocess
import sys

import pytest

SCRIPT = "from engine.shared.process_state import end_signals; print(*map(int, end_signals()))"
IN_A_TERMINAL = (
    "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""A program that runs a command as without nohup, which the tests themselves may run under."""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([], {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}),
        (["nohup"], {signal.SIGTERM, signal.SIGINT}),
    ],
)
def test_closing_terminal_ends_process_unless_nohup(
    command: list[str], expected: set[signal.Signals]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_TERMINAL, *command, sys.executable, "-c", SCRIPT],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert {signal.Signals(int(number)) for number in done.stdout.split()} == expected
