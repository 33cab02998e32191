"""The local socket pair between the supervisor and one child process.

Down it the child gets its launch parameters, so that no secret stands in a command line or
environment; up it the child reports progress, readiness or why it cannot start. Its closing
tells each side that the other has died, whatever killed it.
"""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from engine.shared.messages import (
    ChildFailed,
    ChildProgress,
    ChildReady,
    ChildStatus,
    ChildTurn,
)

logger = logging.getLogger(__name__)

LIFELINE_VARIABLE = "SWELL_LIFELINE_FD"
TURN_INTERVAL = 1.0
"""Seconds between two `turn`s of a main loop."""

ORPHAN_GRACE = 3.0
"""Seconds that a child has for an orderly end after its supervisor has died."""

CANNOT_START = 3
"""Exit code of a child that reported `ChildFailed`: starting it again would not help."""

_LENGTH = struct.Struct("!I")

_LONGEST = (1 << 32) - 1
"""What a length in front of a message can say."""

T = TypeVar("T")


class FrameTooLong(msgspec.DecodeError):
    """A message is announced that is larger than any that is expected."""


def pack_frame(message: Any) -> bytes:
    """Return a message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into typed messages.

    Args:
        largest: bytes that one may have.
    """

    def __init__(self, message_type: Any, largest: int = _LONGEST) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()
        self._largest = largest

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that `data` completes.

        Raises:
            msgspec.DecodeError: one of them is of another type, or too large.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._largest:
                raise FrameTooLong(f"a message of {length} bytes, more than {self._largest}")
            if len(self._buffer) < _LENGTH.size + length:
                break
            end = _LENGTH.size + length
            messages.append(self._decoder.decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


class Lifeline:
    """A child's end of the socket pair; without a supervisor it only logs."""

    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection

    @classmethod
    def from_environment(cls) -> "Lifeline":
        """Return the lifeline that the supervisor left in the environment, if any."""
        descriptor = os.environ.pop(LIFELINE_VARIABLE, None)
        return cls(socket.socket(fileno=int(descriptor)) if descriptor else None)

    def read_launch(self, launch_type: type[T]) -> T:
        """Wait for the launch parameters.

        Raises:
            EOFError: the supervisor died before it sent them, or there is none.
        """
        if self._connection is None:
            raise EOFError("this module is started by the supervisor: use the `swell` command")
        reader = FrameReader(launch_type)
        while True:
            data = self._connection.recv(65536)
            if not data:
                raise EOFError("the supervisor has gone")
            for launch in reader.feed(data):
                return launch  # type: ignore[no-any-return]

    def progress(self, phase: str) -> None:
        """Say what the child is doing while it starts."""
        self._report(ChildProgress(phase))

    def ready(self, detail: str, addresses: dict[str, str] | None = None) -> None:
        """Say that the child serves."""
        self._report(ChildReady(detail, addresses or {}))

    def failed(self, reason: str) -> None:
        """Say why the child cannot start."""
        self._report(ChildFailed(reason))

    def turn(self) -> None:
        """Say that the main loop turns, without waiting for a supervisor that does not read."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(pack_frame(ChildTurn()), socket.MSG_DONTWAIT)

    def _report(self, status: ChildStatus) -> None:
        if self._connection is None:
            # Alone, as in a pod: whoever looks for why it does not start looks for errors.
            level = logging.ERROR if isinstance(status, ChildFailed) else logging.INFO
            logger.log(level, "%s", next(iter(msgspec.structs.astuple(status))))
            return
        try:
            self._connection.sendall(pack_frame(status))
        except OSError:
            logger.warning("the supervisor does not listen any more")

    def end_with_it(self) -> None:
        """Have the kernel end this process when the supervisor dies; needs no thread.

        For a process that has read its launch parameters, after which nothing comes down.
        """
        if self._connection is None:
            return
        descriptor = self._connection.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        # SIGIO, which nobody handles, ends it: at whatever happens on this socket.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)

    def close(self) -> None:
        """Let go of it: it is another process's."""
        if self._connection is not None:
            self._connection.close()

    def watch(self, on_lost: Callable[[], None] | None = None) -> None:
        """End this process when the supervisor dies: SIGTERM first, then at once after a grace.

        The watching thread also ends a process whose main thread is stuck in native code.

        Args:
            on_lost: called in place of all that, for a child whose starter closes the lifeline as
                the ordinary way to end it.
        """
        connection = self._connection
        if connection is None:
            return

        def wait() -> None:
            try:
                while connection.recv(4096):
                    pass
            except OSError:
                pass
            if on_lost is not None:
                on_lost()
                return
            logger.error("the supervisor has gone: stopping")
            leads = os.getpgrp() == os.getpid()
            # Without a handler, as while it starts, SIGTERM would end this process alone.
            if not leads or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait(ORPHAN_GRACE)
            if leads:  # with what this process has started, as vLLM's workers
                os.killpg(0, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=wait, name="lifeline", daemon=True).start()
