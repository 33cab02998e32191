"""The joining side: a node that runs workers of an engine whose leader is on the first node.

It joins the leader, starts the node's workers on request, terminates them when the leader or one of
them has ended, and joins again. It computes nothing itself.
"""

import contextlib
import logging
import signal
import time

import msgspec
import zmq

from engine.executor.environment import compute_processes, configure_environment
from engine.executor.layout import Layout
from engine.executor.nodes.messages import (
    LARGEST_MESSAGE,
    Alive,
    FromLeader,
    FromNode,
    Join,
    Over,
    Piece,
    Refused,
    Start,
)
from engine.executor.nodes.rules import NODES_TIMEOUT, STARTING_PATIENCE, agreement
from engine.executor.nodes.streams import Key, Streams
from engine.executor.team_messages import WorkerLaunch
from engine.executor.worker_process import end_worker, start_worker
from engine.shared.addresses import join_host_port
from engine.shared.config import EngineConfig
from engine.shared.membership import HELLO_INTERVAL
from engine.shared.process_state import end_signals
from engine.shared.transport import Inbox, Transport, make_context
from engine.shared.version import SWELL_VERSION

logger = logging.getLogger(__name__)

_LOG_INTERVAL = 30.0
"""Seconds between log lines while the node waits."""
_LINGER_MS = 500
"""Milliseconds for the last message of a session to be sent."""


class CannotJoin(Exception):
    """The node cannot join the engine; the message is for users."""


class _Link:
    """A connection to the leader for one session; a new one each time keeps sessions separate."""

    def __init__(self, transport: Transport, address: str) -> None:
        """Start connecting.

        Raises:
            OSError: the address is invalid.
        """
        self.poller = zmq.Poller()
        try:
            socket = transport.connect(zmq.DEALER, address, largest=LARGEST_MESSAGE)
        except zmq.ZMQError as error:
            raise OSError(f"cannot connect to {address.removeprefix('tcp://')}: {error}") from error
        self._inbox = Inbox(socket, FromLeader, "the link to the first node")
        self.poller.register(socket, zmq.POLLIN)
        self._handshakes = transport.watch(socket, address, binder=False)
        if self._handshakes is not None:
            self.poller.register(self._handshakes.socket, zmq.POLLIN)

    def send(self, message: FromNode) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._inbox.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromLeader | None:
        if self._handshakes is not None:
            self._handshakes.check()
        received = self._inbox.receive()
        return None if received is None else received[1]

    def close(self) -> None:
        if self._handshakes is not None:
            self._inbox.socket.disable_monitor()
            self._handshakes.socket.close()
        self._inbox.close(_LINGER_MS)


class JoinedNode:
    """This node's share of an engine."""

    def __init__(self, config: EngineConfig, timeout: float) -> None:
        """Create it, without connecting or starting anything.

        Args:
            timeout: maximum seconds of each wait for the leader.

        Raises:
            CannotSpan: the engine cannot span nodes.
            InsecureCluster: there is no cluster key.
        """
        parallel = config.parallel
        assert parallel.master_addr is not None, "settings are checked"
        self._config = config
        self._number = parallel.node_rank
        self._ranks = Layout.of(parallel).on_node(self._number)
        self._join = Join(SWELL_VERSION, self._number, agreement(config))
        self._where = join_host_port(parallel.master_addr, parallel.master_port)
        self._timeout = timeout
        self._interval = config.cluster.heartbeat_interval
        self._is_stopping = False
        self._context = make_context()
        self._transport = Transport(config.cluster, self._context)

    def stop(self) -> None:
        """Stop soon; for signal handlers."""
        self._is_stopping = True

    def run(self) -> None:
        """Serve sessions one after the other until `stop`.

        Raises:
            CannotJoin: the leader refuses this node, or did not appear in time.
            OSError: a worker cannot be started, or the leader's address is invalid.
        """
        configure_environment(compute_processes(self._config, 1))  # inherited by the workers
        try:
            while not self._is_stopping:
                link = _Link(self._transport, f"tcp://{self._where}")
                try:
                    start = self._wait_for_start(link)
                    if start is not None:
                        self._run_workers(link, start)
                finally:
                    link.close()
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _wait_for_start(self, link: _Link) -> Start | None:
        """Wait for the start of a session; return None if the node stops before that.

        Raises:
            CannotJoin: the leader refuses this node, or did not appear in time.
        """
        deadline, next_join, next_line = time.monotonic() + self._timeout, 0.0, 0.0
        refused = logged = ""
        while not self._is_stopping:
            now = time.monotonic()
            if now > deadline:
                raise CannotJoin(
                    f"no engine accepted this node at {self._where} within {self._timeout:.0f} s: "
                    f"{refused or 'is the first node (--node-rank 0) there?'}"
                )
            if now >= next_line or refused != logged:
                next_line, logged = now + _LOG_INTERVAL, refused
                because = f" ({refused})" if refused else ""
                logger.info("waiting for the engine at %s%s", self._where, because)
            if now >= next_join:
                next_join = now + HELLO_INTERVAL
                link.send(self._join)
            link.poller.poll(int(1000 * HELLO_INTERVAL))
            while (message := link.receive()) is not None:
                match message:
                    case Start():
                        return message
                    case Refused(reason, True):
                        raise CannotJoin(reason)
                    case Refused(reason, False):
                        refused = reason
        return None

    def _run_workers(self, link: _Link, start: Start) -> None:
        """Run the workers until the leader, a worker or this node stops."""
        processes = []
        streams = Streams(link.poller)
        size, reason = self._config.parallel.processes, "its workers cannot be started"
        try:
            for rank in self._ranks:
                launch = WorkerLaunch(self._config, start.engine, rank, size, start.address, 1)
                process, lifeline, commands = start_worker(launch)
                processes.append(process)
                streams.add(Key(rank, "lifeline"), lifeline)
                streams.add(Key(rank, "commands"), commands)
            logger.info("workers %s have started", ", ".join(map(str, self._ranks)))
            reason = self._forward(link, streams, start.session)
        finally:
            link.send(Over(start.session, reason))
            streams.close()
            for process in processes:
                assert process is not None, "it was started here"
                end_worker(process)
        logger.info("the workers have ended: %s", reason)

    def _forward(self, link: _Link, streams: Streams, session: int) -> str:
        """Forward bytes in both directions; return why that has ended."""
        longest_poll = max(1, int(1000 * min(self._interval, 0.5)))
        last_message_at, next_alive, patience = time.monotonic(), 0.0, STARTING_PATIENCE
        while not self._is_stopping:
            now = time.monotonic()
            if now >= next_alive:
                next_alive = now + self._interval
                link.send(Alive(session))
            for source, _ in link.poller.poll(longest_poll):
                if isinstance(source, int) and (received := streams.ready(source)) is not None:
                    (rank, channel), data = received
                    link.send(Piece(session, rank, channel, data))
            while (message := link.receive()) is not None:
                last_message_at = time.monotonic()
                match message:
                    case Piece(of, rank, channel, data) if of == session:
                        streams.write(Key(rank, channel), data)
                    case Alive(of, seconds) if of == session:
                        patience = seconds
                    case Over(of, reason) if of == session:
                        return reason
            if time.monotonic() - last_message_at > patience:  # although all received data was read
                return f"no message from the engine for {patience:.0f} s"
        return "it was stopped"


def run(config: EngineConfig, timeout: float = NODES_TIMEOUT) -> int:
    """Run a node's share of an engine until a signal, and return the exit code."""
    try:
        node = JoinedNode(config, timeout)
        for signum in end_signals():
            signal.signal(signum, lambda *_: node.stop())
        node.run()
    except (CannotJoin, ValueError, OSError) as error:
        logger.error("this node cannot join: %s", error)
        return 1
    return 0
