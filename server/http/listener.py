"""uvicorn's server with limits on TLS handshakes, below a process that handles signals itself."""

import contextlib
import functools
import socket
from collections.abc import Iterator

import uvicorn

from server.http.handshake import Handshakes
from server.http.protocol import LimitedHttpProtocol


class HttpServer(uvicorn.Server):
    """Serves on sockets; a client that does not finish its TLS handshake is cut off.

    `handshake_timeout` is in seconds. A connection is one of the protocol's only once its
    handshake has ended; until then it counts as one that waits (`Handshake`).
    """

    def __init__(self, config: uvicorn.Config, handshake_timeout: float) -> None:
        super().__init__(config)
        self._handshake_timeout = handshake_timeout
        self._handshakes: Handshakes | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    def end_connections(self) -> None:
        """Close connections that wait, and each of the others when its answer has ended.

        A client that keeps its connection would else ask once more where it is refused.
        """
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        config = self.config
        if not config.is_ssl:
            await super().startup(sockets)
            return
        await super().startup([])
        protocol_class = config.http_protocol_class
        assert issubclass(protocol_class, LimitedHttpProtocol)
        assert config.ssl is not None
        make = functools.partial(
            protocol_class,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self._handshakes = Handshakes(
            lambda done: make(on_made=done),
            protocol_class.book,
            config.ssl,
            self._handshake_timeout,
        )
        for each in sockets if sockets is not None else [config.bind_socket()]:
            self._handshakes.listen(each, config.backlog)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does, handshakes first."""
        if self._handshakes is not None:
            self._handshakes.stop()
        await super().shutdown(sockets)
