"""GET /health and /ready of a process that serves no HTTP otherwise: engines, the coordinator.

Probes of container platforms ask on their own port and thread, so that the answer says whether
the main loop still turns instead of waiting for it.
"""

import logging
import time
from collections.abc import Callable
from threading import Thread
from typing import Literal, NamedTuple

from engine.shared.addresses import listen
from engine.shared.config import HealthConfig

logger = logging.getLogger(__name__)

Phase = Literal["starting", "ready", "draining"]


class HealthStatus(NamedTuple):
    """An HTTP status and the word that explains it."""

    status: int
    body: str


class Health:
    """What a process's main loop last said about itself."""

    def __init__(
        self,
        stall_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        may_wait: Callable[[float], bool] = lambda now: False,
    ) -> None:
        """Make one that calls a loop stalled after `stall_timeout` seconds without a turn.

        Args:
            may_wait: whether at that time the loop waits for something that may take longer and
                is watched by itself.
        """
        self.phase: Phase = "starting"
        self._stall_timeout = stall_timeout
        self._clock = clock
        self._may_wait = may_wait
        self._last_turn = clock()

    def ready(self) -> None:
        """The process serves from now on; its loop calls `turn` from here on."""
        self.turn()
        if self.phase == "starting":  # it may be asked to end before all know that it serves
            self.phase = "ready"

    def drain(self) -> None:
        """The process takes nothing new from now on."""
        self.phase = "draining"

    def turn(self) -> None:
        """The main loop has made another turn."""
        self._last_turn = self._clock()

    def answer(self, path: str) -> HealthStatus:
        """Return what to answer to GET `path`.

        /health is 503 when the process has to be started again: its loop has stopped turning.
        How long starting takes is the platform's to judge. /ready is 200 while it takes work.
        """
        now = self._clock()
        late = self.phase != "starting" and now - self._last_turn > self._stall_timeout
        stalled = late and not self._may_wait(now)
        match path:
            case "/health":
                return HealthStatus(503, "stalled") if stalled else HealthStatus(200, self.phase)
            case "/ready":
                word = "stalled" if stalled else self.phase
                return HealthStatus(200 if word == "ready" else 503, word)
        return HealthStatus(404, "there are /health and /ready")


def serve_health(config: HealthConfig, health: Health) -> Callable[[], None]:
    """Answer probes on the configured port; without one do nothing.

    Returns:
        What ends it. Processes need not: it ends with them.

    Raises:
        OSError: the port is taken.
    """
    if config.health_port is None:
        return lambda: None
    # Slow to import, and only needed in containers.
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0

        def do_GET(self) -> None:
            status, word = health.answer(self.path)
            body = f"{word}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            logger.debug(format, *arguments)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            # Mostly a probe that did not wait for the answer.
            logger.debug("a health request from %s failed", client_address, exc_info=True)

    server = Server(("", config.health_port), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listen("*", config.health_port, server.request_queue_size)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, name="health", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
