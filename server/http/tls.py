"""TLS: certificates that are reloaded on change, and handshakes.

New connections get the current certificate files. Connections are counted as soon as accepted.
"""

import asyncio
import logging
import ssl

import uvicorn

from engine.shared.watched_file import WatchedFile, any_changed
from server.http.connection_table import Connection, ConnectionTable, client_of

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 1.0
"""Seconds between checks for changed files."""


class Certificates:
    """A TLS context that is rebuilt when one of its files changes.

    Unusable files are ignored: a renewal may write the certificate before its key, while the old
    one is still valid. Existing connections keep their context.
    """

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext) -> None:
        """Start with the context that the server loaded."""
        self._config = config
        self._context = context
        files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        self._files = [WatchedFile(str(file)) for file in files if file is not None]
        self._check_at = 0.0

    def current(self, now: float) -> ssl.SSLContext:
        """Return the context for a connection accepted at `now` (seconds)."""
        if now >= self._check_at:
            self._check_at = now + CHECK_INTERVAL
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
    """Return a context configured as uvicorn does at startup."""
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
    """A connection until its handshake completes.

    Like any waiting connection it is closed for new ones if there are too many.
    """

    def __init__(self, connection_table: ConnectionTable[Connection], address: str) -> None:
        """Register the connection.

        Raises:
            TooManyConnections: there is no room.
        """
        self.task: asyncio.Task[None] | None = None
        """The task that performs the handshake."""
        self._connection_table = connection_table
        self._client = client_of(address)
        self._counts = True
        victim = connection_table.open(self, self._client)
        if victim is not None:
            victim.abort()

    def leave(self) -> None:
        """Unregister it once the handshake has completed or failed; idempotent."""
        if self._counts:
            self._counts = False
            self._connection_table.close(self, self._client)

    def abort(self) -> None:
        """Close the connection immediately."""
        if self.task is not None:
            self.task.cancel()
