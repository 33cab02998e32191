"""Logs peers that cannot join because their cluster key differs.

ZeroMQ drops such a connection silently and retries for ever. Its socket monitor reports it;
each side logs it, once in a while, and nobody else is disturbed.
"""

import logging
import os
import socket
import struct
import time

import zmq

logger = logging.getLogger(__name__)

LOG_INTERVAL = 30.0
"""Seconds between two lines about failed handshakes of one socket."""

_EVENT = struct.Struct("=HI")
"""What `zmq_socket_monitor` puts into the first frame: an event and its value.

pyzmq's own parser would bring an event loop into processes that have none.
"""

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class HandshakeWatch:
    """Watches one socket; its own socket is readable when there is something to `check`."""

    def __init__(self, watched: "zmq.Socket[bytes]", address: str, *, binder: bool) -> None:
        self.failures = 0
        self._address = address
        self._binder = binder
        self._last_peer = ""
        self._silent_until = float("-inf")
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(
            _FAILED | (zmq.EVENT_ACCEPTED if binder else 0)
        )

    def check(self) -> None:
        """Read what has happened and log failed handshakes."""
        while True:
            try:
                head = self.socket.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                return
            event, value = _EVENT.unpack(head)
            if event == zmq.EVENT_ACCEPTED:
                self._last_peer = _peer_name(value)
            elif event & _FAILED:
                self._failed(time.monotonic())

    def _failed(self, now: float) -> None:
        self.failures += 1
        if now < self._silent_until:
            return
        self._silent_until = now + LOG_INTERVAL
        if self._binder:
            logger.warning(
                "refused a peer%s on %s: its cluster key is not ours (%d failed handshakes so far)",
                f" (probably {self._last_peer})" if self._last_peer else "",
                self._address,
                self.failures,
            )
        else:
            logger.warning(
                "%s refused the handshake: --cluster-key-file holds another key there; trying on",
                self._address,
            )


def _peer_name(descriptor: int) -> str:
    """Return the address at the other end of a connection, if it is still open."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return str(connection.getpeername()[0]).removeprefix("::ffff:")
    except (OSError, IndexError):
        return ""
