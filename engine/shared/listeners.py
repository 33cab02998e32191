"""One TCP port on which a socket listens several times, each time with another key.

ZeroMQ keeps one CURVE key per listener. Several listeners share a port (SO_REUSEPORT), and the
kernel gives a connection to any of them: at the wrong one the handshake fails, and the peer, which
tries again for ever, soon comes to the right one.
"""

import contextlib
import socket as sockets

import zmq

from engine.shared.addresses import bare_host, join_host_port, resolve
from engine.shared.cluster_keys import KeyPair

_BACKLOG = 4096


class SharedPort:
    """A port of a binding socket, to which keys are added.

    Raises:
        OSError: the port is taken, by another program or a second one of this kind, or the host is
            none of this machine's.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", address: str) -> None:
        """Choose the port; `address` is tcp://HOST:PORT, where * stands for any host or port."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket
        self._host = bare_host(host)
        self._port = 0 if port == "*" else int(port)
        if self._port:
            with contextlib.closing(self._bound(shared=False)):
                pass  # sharing would hide that somebody else is there

    def accept(self, keys: KeyPair) -> None:
        """Listen once more, for peers that connect with these keys."""
        listener = self._bound(shared=True)
        listener.listen(_BACKLOG)
        self._port = listener.getsockname()[1]
        ipv6 = listener.family == sockets.AF_INET6
        socket = self.socket
        socket.setsockopt(zmq.IPV6, ipv6)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        host = listener.getsockname()[0]
        socket.setsockopt(zmq.USE_FD, listener.detach())
        try:
            socket.bind(f"tcp://{join_host_port(host, self._port)}")
        finally:
            socket.setsockopt(zmq.USE_FD, -1)

    def _bound(self, *, shared: bool) -> sockets.socket:
        if self._host == "*":
            listener = _any_host()
            host = "::" if listener.family == sockets.AF_INET6 else "0.0.0.0"
        else:
            family, address = resolve(self._host)
            listener, host = sockets.socket(family, sockets.SOCK_STREAM), address[0]
        try:
            listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEPORT, 1)
            listener.bind((host, self._port))
        except OSError:
            listener.close()
            raise
        return listener


def _any_host() -> sockets.socket:
    """Return a socket for all interfaces, of IPv4 only where there is no IPv6."""
    if sockets.has_dualstack_ipv6():
        listener = sockets.socket(sockets.AF_INET6, sockets.SOCK_STREAM)
        listener.setsockopt(sockets.IPPROTO_IPV6, sockets.IPV6_V6ONLY, 0)
        return listener
    return sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM)
