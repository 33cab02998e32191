"""GET /health and /ready of processes without another HTTP server: engines, the coordinator.

Probes of container platforms are answered on a separate port and thread, so that the answer reports
the main loop's progress instead of waiting for it.
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
    """An HTTP status and its body."""

    status: int
    body: str


class Health:
    """The main loop's last reported state."""

    def __init__(
        self,
        stall_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        may_wait: Callable[[float], bool] = lambda now: False,
    ) -> None:
        """Report a stall after `stall_timeout` seconds without `record_iteration`.

        Args:
            may_wait: returns whether at that time the loop waits for something that can take longer
                and has a separate timeout.
        """
        self.phase: Phase = "starting"
        self._stall_timeout = stall_timeout
        self._clock = clock
        self._may_wait = may_wait
        self._last_iteration_at = clock()

    def ready(self) -> None:
        """Mark the process as serving; its loop has to call `record_iteration` from here on."""
        self.record_iteration()
        if self.phase == "starting":  # draining can begin earlier
            self.phase = "ready"

    def drain(self) -> None:
        """Mark the process as draining: it accepts no new work."""
        self.phase = "draining"

    def record_iteration(self) -> None:
        """Record an iteration of the main loop."""
        self._last_iteration_at = self._clock()

    def answer(self, path: str) -> HealthStatus:
        """Return the response to GET `path`.

        /health is 503 if the process has to be restarted because its loop has stalled; the platform
        limits the duration of startup. /ready is 200 while the process accepts work.
        """
        now = self._clock()
        late = self.phase != "starting" and now - self._last_iteration_at > self._stall_timeout
        stalled = late and not self._may_wait(now)
        match path:
            case "/health":
                return HealthStatus(503, "stalled") if stalled else HealthStatus(200, self.phase)
            case "/ready":
                word = "stalled" if stalled else self.phase
                return HealthStatus(200 if word == "ready" else 503, word)
        return HealthStatus(404, "there are /health and /ready")


def serve_health(config: HealthConfig, health: Health) -> Callable[[], None]:
    """Answer probes on the configured port; do nothing if there is none.

    Returns:
        A function that stops the server; optional, since its threads are daemons.

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
            # Usually a probe that timed out.
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
