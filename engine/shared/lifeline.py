"""The local socket pair between the supervisor and one child process.

The child receives its launch parameters over it, so that no secret appears in a command line or
environment; it reports progress, readiness or the reason why it cannot start. Closure tells each
side that the other has died, for whatever reason.
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
    ChildHeartbeat,
    ChildProgress,
    ChildReady,
    ChildStatus,
)

logger = logging.getLogger(__name__)

LIFELINE_VARIABLE = "SWELL_LIFELINE_FD"
CHILD_HEARTBEAT_INTERVAL = 1.0
"""Seconds between two heartbeats of a main loop."""

ORPHAN_GRACE = 3.0
"""Seconds for a child's orderly shutdown after its supervisor has died."""

CANNOT_START = 3
"""Exit code of a child that reported `ChildFailed`: restarting it would not help."""

_LENGTH = struct.Struct("!I")

_LONGEST = (1 << 32) - 1
"""Largest value of a length prefix."""

T = TypeVar("T")


class FrameTooLong(msgspec.DecodeError):
    """The length prefix exceeds the maximum."""


def pack_frame(message: Any) -> bytes:
    """Return a message with its length prefix."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a byte stream into typed messages.

    Args:
        largest: maximum bytes per message.
    """

    def __init__(self, message_type: Any, largest: int = _LONGEST) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()
        self._largest = largest

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that `data` completes.

        Raises:
            msgspec.DecodeError: a message has another type, or is too large.
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
            try:
                messages.append(self._decoder.decode(bytes(self._buffer[_LENGTH.size : end])))
            except UnicodeDecodeError as error:
                raise msgspec.DecodeError(str(error)) from error
            del self._buffer[:end]
        return messages


class Lifeline:
    """The child's end of the socket pair; without a supervisor it only logs."""

    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection

    @classmethod
    def from_environment(cls) -> "Lifeline":
        """Return the lifeline passed in the environment by the supervisor, if any."""
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
                raise EOFError("the supervisor has exited")
            for launch in reader.feed(data):
                return launch  # type: ignore[no-any-return]

    def progress(self, phase: str) -> None:
        """Report the phase of startup."""
        self._report(ChildProgress(phase))

    def ready(self, detail: str, addresses: dict[str, str] | None = None) -> None:
        """Report that the child serves."""
        self._report(ChildReady(detail, addresses or {}))

    def failed(self, reason: str) -> None:
        """Report why the child cannot start."""
        self._report(ChildFailed(reason))

    def heartbeat(self) -> None:
        """Report that the main loop runs; never blocks on a supervisor that does not read."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(pack_frame(ChildHeartbeat()), socket.MSG_DONTWAIT)

    def _report(self, status: ChildStatus) -> None:
        if self._connection is None:
            # Without a supervisor, e.g. in a pod, failures are expected at error level.
            level = logging.ERROR if isinstance(status, ChildFailed) else logging.INFO
            logger.log(level, "%s", next(iter(msgspec.structs.astuple(status))))
            return
        try:
            self._connection.sendall(pack_frame(status))
        except OSError:
            logger.warning("the supervisor is no longer listening")

    def exit_with_supervisor(self) -> None:
        """Make the kernel end this process when the supervisor dies; needs no thread.

        For a process that has read its launch parameters and receives nothing else.
        """
        if self._connection is None:
            return
        descriptor = self._connection.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        # SIGIO without a handler ends the process, on any event of this socket.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)

    def close(self) -> None:
        """Close this copy: the lifeline belongs to another process."""
        if self._connection is not None:
            self._connection.close()

    def watch(self, on_lost: Callable[[], None] | None = None) -> None:
        """End this process when the supervisor dies: SIGTERM, then SIGKILL after `ORPHAN_GRACE`.

        The watching thread also ends a process whose main thread is stuck in native code.

        Args:
            on_lost: called instead, for a child whose starter ends it by closing the lifeline.
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
            logger.error("the supervisor has exited: stopping")
            # Not a daemon: a main thread that ends in time does not end it.
            threading.Thread(target=_end_orphan, daemon=False).start()

        threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _end_orphan() -> None:
    leads = os.getpgrp() == os.getpid()
    # SIGTERM without a handler, as during startup, would end only this process.
    if not leads or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.main_thread().join(ORPHAN_GRACE)
    if leads:  # includes its own children, such as vLLM's workers
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
