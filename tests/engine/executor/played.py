"""A worker process simulated by a test."""

import os
import socket

from engine.shared.lifeline import pack_frame
from engine.shared.messages import ChildFailed
from tests.support.waiting import PATIENCE


class Played:
    """The worker's ends of its lifeline and command pipe; replaces `worker_process.spawn`."""

    pid = 0

    def __init__(self, lifeline: int, commands: int) -> None:
        self.lifeline, self.commands = (
            socket.socket(fileno=os.dup(each)) for each in (lifeline, commands)
        )
        for each in (self.lifeline, self.commands):
            each.settimeout(PATIENCE)

    def complain(self) -> None:
        self.lifeline.sendall(pack_frame(ChildFailed("rank 1 lost the group")))
        self.close()

    def close(self) -> None:
        self.lifeline.close()
        self.commands.close()

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        self.close()
