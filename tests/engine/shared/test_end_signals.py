"""A process that is asked to end knows by which signals."""

import signal
import subprocess
import sys

import pytest

SCRIPT = "from engine.shared.end_signals import end_signals; print(*map(int, end_signals()))"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([], {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}),
        (["nohup"], {signal.SIGTERM, signal.SIGINT}),
    ],
)
def test_a_closing_terminal_ends_what_is_not_under_nohup(
    command: list[str], expected: set[signal.Signals]
) -> None:
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert {signal.Signals(int(number)) for number in done.stdout.split()} == expected
