"""uvicorn's server with limits on TLS handshakes, and a fair share of its node's connections.

All front ends of a node accept from one socket. Without `Acceptor`, the first to wake up would
accept all connections that a client opens at once, and could get nearly all of the work.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from server.access.admission_table import AdmissionTable
from server.http.connection_table import TooManyConnections
from server.http.protocol import LimitedHttpProtocol
from server.http.tls import Certificates, Handshake

logger = logging.getLogger(__name__)

YIELD_SECONDS = 0.004
"""Seconds for which a front end with many connections leaves a new one to its neighbours."""

_PAUSE = 0.1
"""Seconds before accepting again after an error, such as running out of descriptors."""

_END_SECONDS = 1.0
"""Maximum seconds for connections that are not served yet to end."""

_MAX_FREE = 64
"""Maximum connections accepted without yielding after no neighbour took one."""


class ConnectionShare:
    """The connection count of a front end relative to its neighbours.

    Args:
        table: shared by the front ends of this node.
    """

    def __init__(self, table: AdmissionTable) -> None:
        self._table = table
        self._count = 0
        self._leaving = False

    def changed(self, count: int) -> None:
        """Publish the number of connections here."""
        self._count = count
        if not self._leaving:
            self._table.set_connections(count)

    def leave(self) -> None:
        """Leave new connections to neighbours, if there are any."""
        self._leaving = True
        self._table.set_connections(None)

    @property
    def is_large(self) -> bool:
        """Whether a neighbour should take the next connection."""
        fewest = self._table.fewest_connections()
        if fewest is None:
            return False
        return self._leaving or self._count - fewest > max(1, self._count // 8)


class AcceptBackoff:
    """Decides when a front end yields new connections to its neighbours. No I/O.

    If no neighbour accepts a connection in time, they are busy or hung: then this one accepts
    without yielding, for twice as many connections each time.
    """

    def __init__(self) -> None:
        self._free = 0
        self._next = 1

    def should_yield(self, share_is_large: bool) -> bool:
        """Return whether to wait before the next connection is accepted."""
        if not share_is_large:
            self._free, self._next = 0, 1
        elif not self._free:
            return True
        else:
            self._free -= 1
        return False

    def neighbour_declined(self) -> None:
        """Report that no neighbour accepted the connection during the wait."""
        self._free = self._next - 1
        self._next = min(2 * self._next, _MAX_FREE)

    def neighbour_accepted(self) -> None:
        """Report that a neighbour accepted it."""
        self._free, self._next = 0, 1


@dataclass(eq=False)
class Acceptor:
    """Accepts connections of a listening socket one at a time, so that other tasks can run."""

    listener: socket.socket
    """Closed after `end`."""
    take: Callable[[socket.socket, str], None]
    """Called with each connection and its address; must not block."""
    share: ConnectionShare | None
    """Of the node's connections; None: never yield."""

    def __post_init__(self) -> None:
        self._backoff = AcceptBackoff()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    def begin(self, backlog: int) -> None:
        """Start accepting."""
        self.listener.setblocking(False)
        self.listener.listen(backlog)
        if self.share is not None:
            self.share.changed(0)
        self._watch()

    def end(self) -> None:
        """Stop accepting."""
        self._loop.remove_reader(self.listener.fileno())
        if self._pause is not None:
            self._pause.cancel()

    def _watch(self) -> None:
        self._pause = None
        self._loop.add_reader(self.listener.fileno(), self._arrived)

    def _resume(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self.listener.fileno())
        self._pause = self._loop.call_later(seconds, then)

    def _arrived(self) -> None:
        if self._backoff.should_yield(self.share is not None and self.share.is_large):
            self._resume(YIELD_SECONDS, self._waited)
        else:
            self._accept()

    def _waited(self) -> None:
        self._watch()
        if self._accept():
            self._backoff.neighbour_declined()
        else:
            self._backoff.neighbour_accepted()

    def _accept(self) -> bool:
        try:
            connection, peer = self.listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            logger.warning("a connection could not be accepted: %s", error)
            self._resume(_PAUSE, self._watch)
            return True
        connection.setblocking(False)
        self.take(connection, peer[0] if isinstance(peer, tuple) else "")
        return True


class HttpServer(uvicorn.Server):
    """Serves on sockets, with a timeout for TLS handshakes.

    `handshake_timeout` is in seconds. A connection is passed to the protocol once its handshake has
    completed; until then it counts as waiting (`Handshake`). `share` is this server's share of the
    node's connections; None for a single server.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        handshake_timeout: float,
        share: ConnectionShare | None = None,
    ) -> None:
        super().__init__(config)
        self._handshake_timeout = handshake_timeout
        self._share = share
        self._certificates: Certificates | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of connections that are not served yet."""
        self._acceptors: list[Acceptor] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not install signal handlers."""
        yield

    def end_connections(self) -> None:
        """Close waiting connections now, and others after their current response.

        Otherwise a client that keeps its connection alive would send another request and be
        refused.
        """
        if self._share is not None:
            self._share.leave()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def answered(self, within: float) -> None:
        """Wait up to `within` seconds until every request is answered."""
        if tasks := list(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=within)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        config = self.config
        if not config.is_ssl and self._share is None:
            await super().startup(sockets)
            return
        await super().startup([])
        if config.ssl is not None:
            self._certificates = Certificates(config, config.ssl)
        for each in sockets if sockets is not None else [config.bind_socket()]:
            acceptor = Acceptor(each, self._take, self._share)
            acceptor.begin(config.backlog)
            self._acceptors.append(acceptor)

    def _take(self, connection: socket.socket, address: str) -> None:
        protocol_class = self.config.http_protocol_class
        assert issubclass(protocol_class, LimitedHttpProtocol)
        options: dict[str, Any] = {}
        handshake = None
        if self._certificates is not None:
            try:
                handshake = Handshake(protocol_class.connection_table, address)
            except TooManyConnections:
                connection.close()
                return
            options = {
                "ssl": self._certificates.current(time.monotonic()),
                "ssl_handshake_timeout": self._handshake_timeout,
            }

        def make() -> LimitedHttpProtocol:
            return protocol_class(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                on_made=handshake.leave if handshake is not None else lambda: None,
            )

        async def serve() -> None:
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    make, connection, **options
                )
            except OSError as error:
                logger.debug("a connection ended before it was served: %s", error)
                connection.close()

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if handshake is not None:
                handshake.leave()
                if task.cancelled():  # possibly before it started
                    connection.close()

        task = asyncio.get_running_loop().create_task(serve())
        self._tasks.add(task)
        task.add_done_callback(ended)
        if handshake is not None:
            handshake.task = task

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, after closing connections that are not served yet."""
        for acceptor in self._acceptors:
            acceptor.end()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_SECONDS)
        await super().shutdown(sockets)
