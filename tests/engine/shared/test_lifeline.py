"""The pair of sockets between the supervisor and a child."""

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from engine.shared.config import EngineConfig, EngineLaunch
from engine.shared.lifeline import LIFELINE_VARIABLE, FrameReader, Lifeline, pack_frame
from engine.shared.messages import ChildFailed, ChildProgress, ChildReady, ChildStatus


def test_launch_parameters_and_statuses_are_exchanged() -> None:
    ours, theirs = socket.socketpair()
    launch = EngineLaunch(EngineConfig(), incarnation=2**47 + 1)
    ours.sendall(pack_frame(launch))
    child = Lifeline(theirs)
    assert child.read_launch(EngineLaunch) == launch
    child.progress("loading")
    child.ready("serving", {"http": "x"})
    child.failed("no")
    assert FrameReader(ChildStatus).feed(ours.recv(65536)) == [
        ChildProgress("loading"),
        ChildReady("serving", {"http": "x"}),
        ChildFailed("no"),
    ]
    ours.close()
    theirs.close()


def test_start_failure_without_supervisor_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        Lifeline(None).progress("loading")
        Lifeline(None).failed("no model")
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "loading"),
        ("ERROR", "no model"),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_frames_survive_arbitrary_fragmentation(size: int) -> None:
    stream = b"".join(pack_frame(ChildProgress("phase " * n)) for n in range(5))
    reader = FrameReader(ChildStatus)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    messages = [message for piece in pieces for message in reader.feed(piece)]
    assert messages == [ChildProgress("phase " * n) for n in range(5)]


def test_exited_supervisor_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(EOFError):
        Lifeline(theirs).read_launch(EngineLaunch)
    theirs.close()
    with pytest.raises(EOFError, match="swell"):
        Lifeline(None).read_launch(EngineLaunch)


def start_child(
    program: str, *, stderr: int = subprocess.DEVNULL, start_new_session: bool = False
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a child that runs a program; return it and the supervisor's end of its lifeline."""
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", f"from engine.shared.lifeline import Lifeline; {program}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            env={**os.environ, LIFELINE_VARIABLE: str(theirs.fileno())},
            start_new_session=start_new_session,
        )
    return child, ours


@pytest.mark.parametrize("stuck", [False, True])
def test_child_exits_with_its_supervisor_even_if_stuck(stuck: bool) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if stuck else ""
    child, ours = start_child(
        f"import signal, sys; {ignore}"
        "Lifeline.from_environment().watch(); print('up', flush=True); sys.stdin.read()"
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        ours.close()
        assert child.wait(timeout=60) == (1 if stuck else -signal.SIGTERM)


@pytest.mark.parametrize("reaction", ["signal.SIG_IGN", "signal.SIG_DFL", "lambda *_: sys.exit()"])
def test_descendants_of_child_exit_with_its_supervisor(reaction: str) -> None:
    child, ours = start_child(
        "import signal, subprocess, sys, time;"
        f"signal.signal(signal.SIGTERM, {reaction});"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "Lifeline.from_environment().watch(); print(other.pid, flush=True); time.sleep(600)",
        start_new_session=True,
    )
    with child:
        assert child.stdout is not None
        other = psutil.Process(int(child.stdout.readline()))
        ours.close()
        assert child.wait(timeout=60) == -signal.SIGKILL
        other.wait(timeout=60)


def test_child_ended_by_lifeline_exits_silently() -> None:
    child, ours = start_child(
        "import os, sys; Lifeline.from_environment().watch(on_lost=lambda: os._exit(0));"
        "sys.stdin.read()",
        stderr=subprocess.PIPE,
    )
    with child:
        ours.close()
        assert child.stderr is not None
        assert child.stderr.read() == b""
        assert child.wait(timeout=60) == 0
