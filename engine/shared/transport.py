"""ZeroMQ sockets between processes: addresses, security, and receiving. No other module makes any.

Local sockets are `ipc://` in a private directory. TCP sockets are encrypted and authenticated by
CURVE with keys derived from one shared secret: a process with the secret can derive the binder's
public key, which is never transmitted, and no other can complete a handshake. All high-water marks
of the control plane are 0 (no limit): messages are never dropped silently; load is bounded by
admission, not by sockets.

A crashed node sends no FIN: its peers would wait for TCP timeouts, which take a quarter of an hour,
or forever if they have nothing to send. So both ends of every TCP connection send heartbeats, a
silent connection is closed after `--engine-timeout`, and every reconnect resolves the host name
again.
"""

import contextlib
import logging
import os
import socket as sockets
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from engine.shared.addresses import (
    ANY_HOSTS,
    address_towards,
    bare_host,
    is_literal,
    join_host_port,
    resolve,
    split_host_port,
    uses_ipv6,
)
from engine.shared.cluster_keys import InsecureCluster, KeyPair, cluster_keys
from engine.shared.config import ClusterConfig
from engine.shared.node_directory import make_private
from engine.shared.process_state import Descriptors, DescriptorWatch

if TYPE_CHECKING:
    import asyncio  # not loaded by the coordinator

logger = logging.getLogger(__name__)

# As ints: combining zmq's enums takes longer than polling a socket.
_MORE, _NOBLOCK = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)

_LONGEST_IPC_PATH = 107  # sockaddr_un.sun_path, less its terminating zero

_LONGEST_TTL_MS = 6_553_500  # ZMTP has 16 bits for tenths of a second

LARGEST_FRAME = 1 << 20
"""Maximum bytes per frame accepted by bound sockets; longer messages are split (`frames_of`)."""

_CURVE_BYTES = 64
"""Upper bound of the bytes that encryption adds to a frame."""

_BACKLOG = 4096

_HANDSHAKE_MS = 10_000  # enough for a thousand peers that reconnect at once

LOG_INTERVAL = 30.0
"""Seconds between two log lines about failed handshakes of one socket."""

_EVENT = struct.Struct("=HI")
"""First frame of a `zmq_socket_monitor` message: event and value.

pyzmq's own parser would load asyncio into processes that do not use it.
"""

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def make_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """Return a process's context: one I/O thread for data, one that can block on name lookups."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
    # Default: 1,023, which an engine with a few hundred front ends would reach.
    context.set(zmq.MAX_SOCKETS, int(context.get(zmq.SOCKET_LIMIT)))
    return context


def advertised_host(cluster: ClusterConfig) -> str:
    """Return the name or address under which other nodes reach this process's sockets.

    Raises:
        OSError: the coordinator's name cannot be resolved, or there is no route to it.
    """
    address = cluster.coordinator_address
    if cluster.advertise_host is not None or not address.startswith("tcp://"):
        return bare_host(cluster.advertise_host or "127.0.0.1")
    host, port = split_host_port(address.removeprefix("tcp://"))
    if host in ANY_HOSTS:
        return sockets.gethostname()
    try:
        return address_towards(host, port)
    except OSError as error:
        raise OSError(f"cannot reach the coordinator's host {host}: {error}") from error


class SharedPort:
    """A TCP port on which a binding socket has several listeners, each with another key.

    ZeroMQ has one CURVE key per listener. Several listeners share a port (SO_REUSEPORT), and the
    kernel assigns a connection to any of them: with the wrong one the handshake fails, and the
    peer, which retries forever, soon reaches the right one.

    Raises:
        OSError: the port is taken, by another program or another `SharedPort`, or the host is not
            an address of this machine.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", address: str) -> None:
        """Choose the port; `address` is tcp://HOST:PORT, where * stands for any host or port."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket
        self._host = bare_host(host)
        self._port = 0 if port == "*" else int(port)
        if self._port:
            with contextlib.closing(self._bound(shared=False)):
                pass  # SO_REUSEPORT would hide that the port is taken

    def accept(self, keys: KeyPair) -> None:
        """Add a listener for peers that connect with these keys."""
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
            has_ipv6 = sockets.has_dualstack_ipv6()
            family, host = (sockets.AF_INET6, "::") if has_ipv6 else (sockets.AF_INET, "0.0.0.0")
            listener = sockets.socket(family, sockets.SOCK_STREAM)
            if has_ipv6:
                listener.setsockopt(sockets.IPPROTO_IPV6, sockets.IPV6_V6ONLY, 0)
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


class HandshakeWatch:
    """Logs peers of one socket whose handshakes fail because their cluster key differs.

    ZeroMQ drops such a connection silently and retries forever. Its socket monitor reports it; each
    side logs it at a limited rate. The watch's own socket is readable when `check` has work.
    """

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
        """Process pending events and log failed handshakes."""
        while True:
            try:
                head = self.socket.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                return
            event, value = _EVENT.unpack(head)
            if event == zmq.EVENT_ACCEPTED:
                try:
                    with sockets.socket(fileno=os.dup(value)) as connection:
                        peer = str(connection.getpeername()[0])
                    self._last_peer = peer.removeprefix("::ffff:")
                except (OSError, IndexError):  # already closed
                    self._last_peer = ""
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
                "%s refused the handshake: --cluster-key-file holds another key there; retrying",
                self._address,
            )


class Transport:
    """Creates sockets on one process's ZeroMQ context, with the cluster's security."""

    def __init__(self, cluster: ClusterConfig, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._context = context
        self._heartbeat_ms = max(100, int(1000 * cluster.heartbeat_interval))
        self._timeout_ms = max(self._heartbeat_ms, int(1000 * cluster.engine_timeout))
        self._insecure = cluster.insecure_cluster
        self._keys = cluster_keys(cluster)
        self._bound: list[tuple[Path, str, zmq.Socket[bytes]]] = []
        self._shared_ports: list[SharedPort] = []
        self._descriptors = DescriptorWatch()

    def bind(
        self, kind: int, address: str, *, largest: int = LARGEST_FRAME, max_queued: int = 0
    ) -> "zmq.Socket[bytes]":
        """Return a bound socket; its real address (TCP port 0 resolved) is `last_endpoint`.

        Args:
            largest: maximum bytes per frame; a peer that sends a larger one is disconnected, even
                before it has authenticated.
            max_queued: maximum messages queued per peer; further ones are dropped. 0: no limit.
        """
        socket = self._socket(kind, address, binder=True, largest=largest)
        socket.setsockopt(zmq.SNDHWM, max_queued)
        if address.startswith("tcp://") and self._keys is not None and self._keys.are_exchanged:
            port = SharedPort(socket, address)
            for keys in self._keys.accepted:
                port.accept(keys)
            self._shared_ports.append(port)
            return socket
        try:
            socket.bind(address)
        except zmq.ZMQError:
            socket.close()
            raise
        if address.startswith("ipc://"):
            self._bound.append((Path(address.removeprefix("ipc://")), address, socket))
        return socket

    def maintain(self) -> None:
        """Rebind local sockets whose files were removed, and accept added cluster keys; call
        periodically.

        Existing connections survive without the file, but new peers cannot connect. The sockets
        must belong to the calling thread.
        """
        self._descriptors.refresh(time.monotonic())
        self._accept_new_keys()
        self._bound = [each for each in self._bound if not each[2].closed]
        for path, address, socket in self._bound:
            if path.exists():
                continue
            try:
                make_private(path.parent)
                # The old listener stays: unbinding it would remove the new file.
                socket.bind(address)
            except (OSError, zmq.ZMQError) as error:
                logger.error("%s was removed and cannot be bound again: %s", path, error)
            else:
                logger.warning("%s was removed: bound again", path)

    @property
    def descriptors(self) -> Descriptors | None:
        """Descriptors of this process at the last `maintain` or `connect`."""
        return self._descriptors.newest

    def _accept_new_keys(self) -> None:
        new = self._keys.refresh() if self._keys is not None else []
        self._shared_ports = [port for port in self._shared_ports if not port.socket.closed]
        for keys in new:
            for port in self._shared_ports:
                try:
                    port.accept(keys)
                except (OSError, zmq.ZMQError) as error:
                    logger.error("the new cluster key is not accepted here: %s", error)

    def connect(
        self,
        kind: int,
        address: str,
        *,
        identity: bytes | None = None,
        largest: int | None = None,
    ) -> "zmq.Socket[bytes]":
        """Return a connecting socket; ZeroMQ reconnects for as long as it is open.

        Args:
            largest: as for `bind`.
        """
        self._descriptors.refresh(time.monotonic())
        self._accept_new_keys()
        socket = self._socket(kind, address, binder=False, largest=largest)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(address)
        return socket

    def watch(
        self, socket: "zmq.Socket[bytes]", address: str, *, binder: bool
    ) -> HandshakeWatch | None:
        """Return a watch for failed handshakes; None if the socket has no CURVE security."""
        if self._keys is None or not address.startswith("tcp://"):
            return None
        return HandshakeWatch(socket, address, binder=binder)

    def _socket(
        self, kind: int, address: str, *, binder: bool, largest: int | None
    ) -> "zmq.Socket[bytes]":
        if address.startswith("ipc://") and len(address) - len("ipc://") > _LONGEST_IPC_PATH:
            raise ValueError(f"{address} is too long for a socket: choose a shorter --socket-dir")
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if largest is not None:
            socket.setsockopt(zmq.MAXMSGSIZE, largest + _CURVE_BYTES)
        if address.startswith("tcp://"):
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.HEARTBEAT_IVL, self._heartbeat_ms)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._timeout_ms)
            socket.setsockopt(zmq.HEARTBEAT_TTL, min(self._timeout_ms, _LONGEST_TTL_MS))
            socket.setsockopt(zmq.TCP_MAXRT, self._timeout_ms)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, self._timeout_ms)
            socket.setsockopt(zmq.HANDSHAKE_IVL, max(self._timeout_ms, _HANDSHAKE_MS))
            host = bare_host(address.removeprefix("tcp://").rpartition(":")[0])
            socket.setsockopt(zmq.IPV6, uses_ipv6(host))
            if self._context.get(zmq.IO_THREADS) > 1:
                # Name lookups can take seconds and must not delay token traffic.
                looks_up = host != "*" and not is_literal(host)
                socket.setsockopt(zmq.AFFINITY, 2 if looks_up else 1)
            if self._keys is not None:
                own = self._keys.connecting
                if binder:
                    socket.setsockopt(zmq.CURVE_SERVER, 1)
                else:
                    socket.setsockopt(zmq.CURVE_SERVERKEY, own.public)
                    own = KeyPair(*zmq.curve_keypair())
                socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
                socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
            elif not self._insecure:
                socket.close()
                raise InsecureCluster(
                    f"{address}: TCP between processes needs --cluster-key-file "
                    "(or --insecure-cluster on a trusted network)"
                )
        return socket


def frames_of(message: bytes) -> list[bytes]:
    """Split a message into frames of at most `LARGEST_FRAME` bytes."""
    starts = range(0, len(message), LARGEST_FRAME)
    return [message[start : start + LARGEST_FRAME] for start in starts]


def bound_address(socket: "zmq.Socket[bytes]", advertise_host: str) -> str:
    """Return the address under which peers reach a bound socket."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    address = endpoint.rstrip(b"\0").decode()
    if address.startswith("tcp://"):
        return f"tcp://{join_host_port(advertise_host, address.rpartition(':')[2])}"
    return address


class Inbox:
    """Typed, non-blocking receiver on one socket; malformed messages are counted and dropped.

    Works with a poller (`receive` when readable) and with an event loop (`attach`).
    """

    def __init__(self, socket: "zmq.Socket[bytes]", message_type: Any, name: str) -> None:
        self.socket = socket
        self.dropped = 0
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message_type)
        self._name = name
        self._tells_senders = socket.socket_type == zmq.ROUTER
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_readable: Callable[[], None] = lambda: None

    def receive(self) -> tuple[bytes, Any] | None:
        """Return (sender, message) of the next valid message, None if there is none now.

        The sender is a ROUTER peer's identity, empty on other sockets.
        """
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            sender = frames.pop(0) if self._tells_senders else b""
            message = self.decode(frames[0] if len(frames) == 1 else b"".join(frames))
            if message is not None:
                return sender, message

    def decode(self, frame: bytes) -> Any | None:
        """Decode a frame; return None if it is malformed, which is counted and logged once."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("dropped a malformed message on %s: %s", self._name, error)
            return None

    def attach(
        self, loop: "asyncio.AbstractEventLoop", handle: Callable[[bytes, Any], None]
    ) -> None:
        """Call `handle(sender, message)` for every message, from an event loop."""

        def on_readable() -> None:
            # The descriptor is edge-triggered: read until empty, but yield to other callbacks.
            for _ in range(64):
                if self.socket.closed:
                    return
                received = self.receive()
                if received is None:
                    return
                handle(*received)
            loop.call_soon(on_readable)

        self._loop, self._on_readable = loop, on_readable
        loop.add_reader(self.socket.fileno(), on_readable)
        loop.call_soon(on_readable)

    def send(self, *frames: bytes) -> None:
        """Send on the same socket without blocking.

        Raises:
            zmq.ZMQError: the peer is unknown and the socket has ROUTER_MANDATORY set.
        """
        for frame in frames[:-1]:
            self.socket.send(frame, _MORE)
        self.socket.send(frames[-1], _NOBLOCK)
        # Sending can consume the descriptor's edge for a message that has just arrived.
        if self._loop is not None and int(self.socket.getsockopt(_EVENTS)) & _READABLE:
            self._loop.call_soon(self._on_readable)

    def close(self, linger_ms: int = 0) -> None:
        """Detach from the event loop, if attached, and close the socket."""
        if self._loop is not None:
            self._loop.remove_reader(self.socket.fileno())
            self._loop = None
        self.socket.close(linger=linger_ms)
