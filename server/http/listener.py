"""uvicorn's server with an end to TLS handshakes, below a process that handles signals itself."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Iterator

import uvicorn


class HttpServer(uvicorn.Server):
    """Serves on sockets; a client that does not finish its TLS handshake is cut off.

    `handshake_timeout` is in seconds. A connection is one of the protocol's only once its
    handshake has ended, so nothing else would end it.
    """

    def __init__(self, config: uvicorn.Config, handshake_timeout: float) -> None:
        super().__init__(config)
        self._handshake_timeout = handshake_timeout

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        config = self.config
        if not config.is_ssl:
            await super().startup(sockets)
            return
        await super().startup([])
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        protocol = functools.partial(
            make, config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        loop = asyncio.get_running_loop()
        for each in sockets if sockets is not None else [config.bind_socket()]:
            server = await loop.create_server(
                protocol,
                sock=each,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=self._handshake_timeout,
            )
            self.servers.append(server)
