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


@pytest.mark.parametrize("stuck", [False, True])
def test_child_exits_with_its_supervisor_even_if_stuck(stuck: bool) -> None:
    ours, theirs = socket.socketpair()
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if stuck else ""
    program = (
        f"import signal, sys; from engine.shared.lifeline import Lifeline; {ignore}"
        "Lifeline.from_environment().watch(); print('up', flush=True);"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env={**os.environ, LIFELINE_VARIABLE: str(theirs.fileno())},
    )
    theirs.close()
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"up\n"
    ours.close()
    code = child.wait(timeout=60)
    assert code == (1 if stuck else -signal.SIGTERM)
    child.stdout.close()
    child.stdin.close()


@pytest.mark.parametrize("reaction", ["signal.SIG_IGN", "signal.SIG_DFL", "lambda *_: sys.exit()"])
def test_descendants_of_child_exit_with_its_supervisor(reaction: str) -> None:
    ours, theirs = socket.socketpair()
    program = (
        "import signal, subprocess, sys, time; from engine.shared.lifeline import Lifeline;"
        f"signal.signal(signal.SIGTERM, {reaction});"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "Lifeline.from_environment().watch(); print(other.pid, flush=True); time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=[theirs.fileno()],
        env={**os.environ, LIFELINE_VARIABLE: str(theirs.fileno())},
    )
    theirs.close()
    assert child.stdout is not None
    other = psutil.Process(int(child.stdout.readline()))
    ours.close()
    assert child.wait(timeout=60) == -signal.SIGKILL
    other.wait(timeout=60)
    child.stdout.close()


def test_child_ended_by_lifeline_exits_silently() -> None:
    ours, theirs = socket.socketpair()
    program = (
        "import os, sys; from engine.shared.lifeline import Lifeline;"
        "Lifeline.from_environment().watch(on_lost=lambda: os._exit(0));"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        env={**os.environ, LIFELINE_VARIABLE: str(theirs.fileno())},
    )
    theirs.close()
    ours.close()
    assert child.stderr is not None
    assert child.stderr.read() == b""
    assert child.wait(timeout=60) == 0
    child.stderr.close()
    assert child.stdin is not None
    child.stdin.close()
