"""The leader's side of an engine that spans nodes: waits for nodes and forwards bytes.

One thread at a time uses the sockets: the one that waits for the nodes, then this module's own.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from engine.executor.layout import Layout
from engine.executor.nodes.messages import (
    Alive,
    FromLeader,
    FromNode,
    Join,
    Over,
    Piece,
    Refused,
    Start,
)
from engine.executor.nodes.rules import (
    NODES_TIMEOUT,
    STARTING_PATIENCE,
    agreement,
    difference,
)
from engine.executor.nodes.streams import Key, Streams
from engine.executor.worker_process import StartedWorker
from engine.shared.addresses import is_loopback, join_host_port, resolve
from engine.shared.config import EngineConfig
from engine.shared.lifeline import pack_frame
from engine.shared.messages import ChildFailed
from engine.shared.transport import Inbox, Transport, make_context
from engine.shared.version import SWELL_VERSION

logger = logging.getLogger(__name__)

_LOG_INTERVAL = 30.0
"""Seconds between log lines about missing nodes."""
_LINGER_MS = 1000
"""Milliseconds for the last message of a session to be sent."""


class NodesMissing(TimeoutError):
    """Not all nodes joined in time."""


class _Node:
    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.last_message_at = time.monotonic()


class NodeLinks:
    """The connections to all other nodes of an engine."""

    def __init__(self, config: EngineConfig) -> None:
        """Listen for the nodes.

        Raises:
            CannotSpan: the engine cannot span nodes.
            InsecureCluster: there is no cluster key.
            OSError: `--master-addr` cannot be listened on.
        """
        parallel = config.parallel
        assert parallel.master_addr is not None, "settings are checked"
        self._agreement = agreement(config)
        self._layout = Layout.of(parallel)
        self._interval = config.cluster.heartbeat_interval
        self._longest_poll = max(1, int(1000 * min(self._interval, 0.5)))
        self._timeout = max(config.cluster.engine_timeout, self._interval)
        self._patience = STARTING_PATIENCE
        """Seconds of silence after which the nodes are to give up this process."""
        self._session = secrets.randbits(48)
        self._nodes: dict[int, _Node] = {}
        self._logged, self._next_log_at = "", 0.0
        self._next_alive = 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._streams = Streams(self._poller)
        self._context = make_context()
        try:
            self.host = _own_address(parallel.master_addr)
            if is_loopback(self.host) and self.host != parallel.master_addr:
                logger.warning(
                    "--master-addr %s is %s here, which other machines cannot reach: set an "
                    "address instead of a name",
                    parallel.master_addr,
                    self.host,
                )
            self._address = f"tcp://{join_host_port(self.host, parallel.master_port)}"
            self._transport = Transport(config.cluster, self._context)
            self._socket = _bound(self._transport, self._address)
        except BaseException:
            self._free()
            raise
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._inbox = Inbox(self._socket, FromNode, "the link of nodes")
        self._poller.register(self._socket, zmq.POLLIN)
        self._handshakes = self._transport.watch(self._socket, self._address, binder=True)
        if self._handshakes is not None:
            self._poller.register(self._handshakes.socket, zmq.POLLIN)

    def wait(self, progress: Callable[[str], None], timeout: float = NODES_TIMEOUT) -> None:
        """Wait until all nodes have joined.

        Args:
            progress: receives human-readable progress messages.

        Raises:
            NodesMissing: they did not join in time.
        """
        deadline, next_log_at, before = time.monotonic() + timeout, 0.0, ""
        while missing := self._missing():
            names = ", ".join(f"node {node}" for node in missing)
            ranks = " or ".join(map(str, missing))
            where = self._address.removeprefix("tcp://")
            to_do = f"run the same command with --node-rank {ranks} there"
            now = time.monotonic()
            if now > deadline:
                raise NodesMissing(
                    f"{names} did not join at {where} within {timeout:.0f} s: {to_do}"
                )
            if names != before or now > next_log_at:
                progress(f"waiting for {names} to join at {where}: {to_do}")
                logger.info("waiting for %s to join at %s: %s", names, where, to_do)
                next_log_at, before = now + _LOG_INTERVAL, names
            self._run_once()

    def worker(self, rank: int) -> StartedWorker:
        """Return a worker of another node, to be started by `begin`."""
        lifeline, its_lifeline = socket.socketpair()
        commands, its_commands = socket.socketpair()
        self._streams.add(Key(rank, "lifeline"), its_lifeline)
        self._streams.add(Key(rank, "commands"), its_commands)
        return StartedWorker(None, lifeline, commands)

    def begin(self, engine: int, address: str) -> None:
        """Make the nodes start their workers, which rendezvous with the engine's at HOST:PORT."""
        for node in self._nodes.values():
            node.last_message_at = time.monotonic()
            self._send(node.identity, Start(self._session, engine, address))
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """From now on, let nodes give up this process after `--engine-timeout` of silence."""
        self._patience = self._timeout
        self._next_alive = 0.0
        os.write(self._wake_write, b"x")

    def close(self) -> None:
        """Terminate the workers of all nodes; idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        os.write(self._wake_write, b"x")
        if self._thread is not None:
            self._thread.join()
        for node in self._nodes.values():
            self._send(node.identity, Over(self._session, "the engine has ended"))
        self._free()

    def _free(self) -> None:
        self._streams.close()
        self._context.destroy(linger=_LINGER_MS)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._run_once()
                now = time.monotonic()
                for number, node in list(self._nodes.items()):
                    if now - node.last_message_at > self._timeout:
                        self._lost(number, f"no message from it for {self._timeout:.0f} s")
        except Exception:
            logger.exception("messages of the other nodes cannot be forwarded")
            self._streams.close()  # which the team sees as the death of their workers

    def _run_once(self) -> None:
        for source, _ in self._poller.poll(self._longest_poll):
            if isinstance(source, int):
                self._read(source)
        if self._handshakes is not None:
            self._handshakes.check()
        self._listen()
        now = time.monotonic()
        if now >= self._next_alive:
            self._next_alive = now + self._interval
            self._transport.maintain()
            alive = Alive(self._session, self._patience)
            nodes = self._nodes.values()
            unreachable = [node for node in nodes if not self._send(node.identity, alive)]
            if unreachable:
                self._listen()  # for their last messages
            for number in [number for number, node in self._nodes.items() if node in unreachable]:
                self._lost(number, "its connection was closed")

    def _listen(self) -> None:
        while (received := self._inbox.receive()) is not None:
            self._handle(*received)

    def _read(self, descriptor: int) -> None:
        if descriptor == self._wake_read:
            os.read(descriptor, 1)
            return
        received = self._streams.ready(descriptor)
        if received is None:
            return
        key, data = received
        node = self._nodes.get(self._layout.node(key.rank))
        if node is not None:
            self._send(node.identity, Piece(self._session, key.rank, key.channel, data))

    def _handle(self, sender: bytes, message: FromNode) -> None:
        if isinstance(message, Join):
            self._joined(sender, message)
            return
        number = next((n for n, node in self._nodes.items() if node.identity == sender), None)
        if number is None or message.session != self._session:
            self._send(sender, Over(message.session, "the engine has restarted"))
            return
        self._nodes[number].last_message_at = time.monotonic()
        match message:
            case Piece(_, rank, channel, data) if self._layout.node(rank) == number:
                self._streams.write(Key(rank, channel), data)
            case Over(_, reason):
                self._lost(number, reason)

    def _joined(self, sender: bytes, join: Join) -> None:
        reason = difference({"Swell": SWELL_VERSION}, {"Swell": join.version}) or difference(
            self._agreement, join.agreement
        )
        if reason is None and not 0 < join.node < self._layout.nodes:
            reason = f"there are nodes 1 to {self._layout.nodes - 1}"
        if reason is not None:
            self._refuse(sender, join.node, reason, final=True)
            return
        known = self._nodes.get(join.node)
        if known is not None and known.identity == sender:
            known.last_message_at = time.monotonic()
        elif known is not None and self._is_fresh(known):
            self._refuse(sender, join.node, "it, or another with its number, is here", final=False)
        elif self._thread is not None:
            self._refuse(sender, join.node, "the engine is about to end", final=False)
        else:
            logger.info("node %d has joined", join.node)
            self._nodes[join.node] = _Node(sender)

    def _refuse(self, sender: bytes, number: int, reason: str, *, final: bool) -> None:
        self._send(sender, Refused(f"node {number} is refused: {reason}", final))
        now = time.monotonic()
        if final and (reason != self._logged or now > self._next_log_at):
            self._logged, self._next_log_at = reason, now + _LOG_INTERVAL
            logger.warning("node %d is refused: %s", number, reason)

    def _missing(self) -> list[int]:
        joined = {number for number, node in self._nodes.items() if self._is_fresh(node)}
        return [number for number in range(1, self._layout.nodes) if number not in joined]

    def _is_fresh(self, node: _Node) -> bool:
        return time.monotonic() - node.last_message_at < self._timeout

    def _lost(self, number: int, reason: str) -> None:
        """Make the team see a node's workers as failed."""
        logger.warning("node %d is lost: %s", number, reason)
        node = self._nodes.pop(number)
        self._send(node.identity, Over(self._session, reason))
        failed = pack_frame(ChildFailed(f"node {number} is lost: {reason}"))
        for rank in self._layout.on_node(number):
            self._streams.write(Key(rank, "lifeline"), failed)
            self._streams.write(Key(rank, "lifeline"), b"")
            self._streams.write(Key(rank, "commands"), b"")

    def _send(self, identity: bytes, message: FromLeader) -> bool:
        """Send a message; return False if the connection is gone."""
        try:
            self._inbox.send(identity, msgspec.msgpack.encode(message))
        except zmq.ZMQError:
            return False
        return True


def _bound(transport: Transport, address: str) -> "zmq.Socket[bytes]":
    try:
        return transport.bind(zmq.ROUTER, address)
    except (zmq.ZMQError, OSError) as error:  # the latter if cluster keys are exchanged
        raise OSError(
            f"cannot listen on {address.removeprefix('tcp://')}: {error}: --master-addr has to be "
            "an address of this node, and --master-port free"
        ) from error


def _own_address(name: str) -> str:
    """Return the address to listen on, since sockets do not accept names."""
    try:
        return resolve(name)[1][0]
    except OSError as error:
        raise OSError(f"--master-addr {name} cannot be resolved: {error}") from error
