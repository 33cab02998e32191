"""Non-blocking local sockets of workers whose bytes are forwarded between nodes.

Workers, and the team that leads them, use plain sockets on any node; the other ends of these are
here, on both nodes. Data not yet read by a worker is buffered: the leader sends at most a few steps
ahead.
"""

import socket
from typing import NamedTuple

import zmq

from engine.executor.nodes.messages import LARGEST_PIECE, Channel


class Key(NamedTuple):
    """Identifies a worker's socket."""

    rank: int
    channel: Channel


class _Stream:
    def __init__(self, key: Key, connection: socket.socket) -> None:
        self.key = key
        self.connection = connection
        self.waiting = bytearray()
        self.is_ending = False


class Streams:
    """All forwarded sockets, registered in a shared poller."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._streams: dict[Key, _Stream] = {}
        self._by_descriptor: dict[int, _Stream] = {}

    def add(self, key: Key, connection: socket.socket) -> None:
        """Take ownership of a socket."""
        connection.setblocking(False)
        stream = _Stream(key, connection)
        self._streams[key] = self._by_descriptor[connection.fileno()] = stream
        self._poller.register(connection.fileno(), zmq.POLLIN)

    def ready(self, descriptor: int) -> tuple[Key, bytes] | None:
        """Continue with a socket that the poller has reported.

        Returns the bytes received, empty if it has been closed; None if there were none.
        """
        stream = self._by_descriptor.get(descriptor)
        if stream is None:
            return None
        self._flush(stream)
        if stream.key not in self._streams:
            return None
        try:
            data = stream.connection.recv(LARGEST_PIECE)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._drop(stream)
        return stream.key, data

    def write(self, key: Key, data: bytes) -> None:
        """Forward bytes once they can be written; empty bytes close the socket after earlier
        ones."""
        stream = self._streams.get(key)
        if stream is None:
            return  # the other end was closed, which is noticed elsewhere
        stream.waiting += data
        stream.is_ending |= not data
        self._flush(stream)

    def close(self) -> None:
        """Close all sockets."""
        for stream in list(self._streams.values()):
            self._drop(stream)

    def _flush(self, stream: _Stream) -> None:
        try:
            while stream.waiting:
                del stream.waiting[: stream.connection.send(stream.waiting)]
        except BlockingIOError:
            pass
        except OSError:  # reading will report that it was closed
            stream.waiting.clear()
        if stream.is_ending and not stream.waiting:
            self._drop(stream)
        elif stream.key in self._streams:
            events = zmq.POLLIN | (zmq.POLLOUT if stream.waiting else 0)
            self._poller.modify(stream.connection.fileno(), events)

    def _drop(self, stream: _Stream) -> None:
        if self._streams.pop(stream.key, None) is None:
            return
        descriptor = stream.connection.fileno()
        del self._by_descriptor[descriptor]
        self._poller.unregister(descriptor)
        stream.connection.close()
