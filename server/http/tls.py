"""TLS: the certificate that new connections see, and their handshakes.

The certificate is that of the files as they are now. Connections count from their first moment on.
"""

import asyncio
import logging
import ssl

import uvicorn

from engine.shared.watched_file import WatchedFile, any_changed
from server.http.connection_book import Connection, ConnectionBook, client_of

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 1.0
"""Seconds between looks at whether the files have changed."""


class Certificates:
    """A TLS context, made anew when one of its files changes.

    Files that cannot be used change nothing: a renewal may write the certificate before its key,
    and the old one is still valid then. Connections keep the context that they began with.
    """

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext) -> None:
        """Begin with what the server has loaded at its start."""
        self._config = config
        self._context = context
        files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        self._files = [WatchedFile(str(file)) for file in files if file is not None]
        self._look_at = 0.0

    def current(self, now: float) -> ssl.SSLContext:
        """Return the context for a connection that is accepted at a time in seconds."""
        if now >= self._look_at:
            self._look_at = now + LOOK_INTERVAL
            if any_changed(self._files):
                names = ", ".join(str(file.path) for file in self._files)
                try:
                    self._context = _context(self._config)
                except (OSError, ValueError) as error:  # SSLError is an OSError
                    logger.error("keeping the old certificate: cannot use %s: %s", names, error)
                else:
                    logger.info("reloaded the certificate: %s", names)
        return self._context


def _context(config: uvicorn.Config) -> ssl.SSLContext:
    """Return a context as uvicorn makes one when it starts."""
    assert config.ssl_certfile is not None
    context = ssl.SSLContext(config.ssl_version)
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    if config.ssl_ca_certs is not None:
        context.load_verify_locations(config.ssl_ca_certs)
    if config.ssl_ciphers:
        context.set_ciphers(config.ssl_ciphers)
    return context


class Handshake:
    """A connection until its handshake is done.

    Like a connection that waits for its client it gives way to new ones when there are too many.
    """

    def __init__(self, book: ConnectionBook[Connection], address: str) -> None:
        """Take a place in the book.

        Raises:
            TooManyConnections: there is none.
        """
        self.task: asyncio.Task[None] | None = None
        """Makes the handshake."""
        self._book = book
        self._client = client_of(address)
        self._counts = True
        victim = book.open(self, self._client)
        if victim is not None:
            victim.cut()

    def leave(self) -> None:
        """It is done, or has failed: leave its place to the connection's server; idempotent."""
        if self._counts:
            self._counts = False
            self._book.close(self, self._client)

    def cut(self) -> None:
        """End the connection at once."""
        if self.task is not None:
            self.task.cancel()
