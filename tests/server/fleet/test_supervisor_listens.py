"""Errors of the address that `swell serve` listens on, as the operator reads them."""

import re
import socket
import subprocess
import sys

import pytest

MAIN = "import sys; from server.cli import main; sys.exit(main())"


def why_not(*flags: str) -> str:
    """Return what `swell serve` says when it cannot start."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "serve", "--executor", "simulated", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return done.stdout + done.stderr


def test_taken_port_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = why_not("--port", str(taken.getsockname()[1]))
    assert "Address already in use. Is something else running there? Choose another --port" in said


@pytest.mark.parametrize(
    ("flags", "reason", "advice"),
    [
        (["--host", "no where"], ": [^.]*(known|resol)[^.]*", "Check --host and --port."),
        (["--uds", f"/tmp/{'x' * 120}"], ": AF_UNIX path too long", "Choose another --uds."),
        (["--uds", "/nowhere/s"], ": No such file or directory", "Choose another --uds."),
    ],
)
def test_address_that_cannot_be_used_is_not_called_taken(
    flags: list[str], reason: str, advice: str
) -> None:
    said = why_not(*flags)
    assert "Is something else running" not in said
    assert advice in said
    assert re.search(reason, said), said
