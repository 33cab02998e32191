"""uvicorn's server with limits on TLS handshakes, below a process that handles signals itself."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator

import uvicorn

from server.http.acceptor import Acceptor, ConnectionShare, Take, Tasks, serve_plain
from server.http.certificates import Certificates
from server.http.handshake import Handshakes
from server.http.protocol import LimitedHttpProtocol


class HttpServer(uvicorn.Server):
    """Serves on sockets; a client that does not finish its TLS handshake is cut off.

    `handshake_timeout` is in seconds. A connection is one of the protocol's only once its
    handshake has ended; until then it counts as one that waits (`Handshake`). `share` is what
    this server has of the connections of its node; None for one that is alone.
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
        self._tasks = Tasks()
        self._acceptors: list[Acceptor] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    def end_connections(self) -> None:
        """Close connections that wait, and each of the others when its answer has ended.

        A client that keeps its connection would else ask once more where it is refused.
        """
        if self._share is not None:
            self._share.leave()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def answered(self, within: float) -> None:
        """Wait until every request is answered, at most `within` seconds."""
        if tasks := list(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=within)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        config = self.config
        if not config.is_ssl and self._share is None:
            await super().startup(sockets)
            return
        await super().startup([])
        take = self._taker()
        for each in sockets if sockets is not None else [config.bind_socket()]:
            acceptor = Acceptor(each, take, self._share)
            acceptor.begin(config.backlog)
            self._acceptors.append(acceptor)

    def _taker(self) -> Take:
        """Return what has a connection served that was accepted."""
        config, begin = self.config, self._tasks.begin
        protocol_class = config.http_protocol_class
        assert issubclass(protocol_class, LimitedHttpProtocol)
        make = functools.partial(
            protocol_class,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        if config.ssl is not None:
            return Handshakes(
                lambda done: make(on_made=done),
                protocol_class.book,
                Certificates(config, config.ssl),
                self._handshake_timeout,
                begin,
            ).take

        def take(connection: socket.socket, _: str) -> None:
            begin(serve_plain(connection, make))

        return take

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, after closing connections that are not served yet."""
        for acceptor in self._acceptors:
            acceptor.end()
        await self._tasks.end()
        await super().shutdown(sockets)
