"""Starts and ends one worker process of an engine. No torch."""

import logging
import os
import socket
import subprocess
import sys
from typing import NamedTuple

import msgspec

from engine.executor.team_messages import WorkerLaunch
from engine.shared.lifeline import LIFELINE_VARIABLE, pack_frame

logger = logging.getLogger(__name__)

WORKER_MODULE = "engine.executor.worker_main"
"""Module that workers run."""
END_TIMEOUT = 5.0
"""Seconds for workers to exit after their sockets were closed."""


class StartedWorker(NamedTuple):
    """A worker process, with this side's ends of its two sockets."""

    process: "subprocess.Popen[bytes] | None"
    """None if it is on another node, which ends it when its sockets are closed."""
    lifeline: socket.socket
    commands: socket.socket


def start_worker(launch: WorkerLaunch) -> StartedWorker:
    """Start a worker and send its launch parameters.

    Raises:
        OSError: the process cannot be started.
    """
    lifeline, its_lifeline = socket.socketpair()
    commands, its_commands = socket.socketpair()
    with its_lifeline, its_commands:
        descriptors = its_lifeline.fileno(), its_commands.fileno()
        try:
            process = spawn(*descriptors)
        except OSError:
            lifeline.close()
            commands.close()
            raise
    launch = msgspec.structs.replace(launch, commands=descriptors[1])
    try:
        lifeline.sendall(pack_frame(launch))
    except OSError:  # it has exited, which its lifeline reports
        logger.debug("worker %d exited before it was launched", launch.rank)
    return StartedWorker(process, lifeline, commands)


def end_worker(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the exit of a worker whose sockets were closed; kill it on timeout."""
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def spawn(lifeline: int, commands: int) -> "subprocess.Popen[bytes]":
    """Start a process that inherits these descriptors: its lifeline, and its commands.

    Raises:
        OSError: the process cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER_MODULE],
        stdin=subprocess.DEVNULL,
        env={**os.environ, LIFELINE_VARIABLE: str(lifeline)},
        pass_fds=(lifeline, commands),
        start_new_session=True,  # signals from a terminal are for the supervisor
    )
