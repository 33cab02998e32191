"""One log line per HTTP response. Pure ASGI middleware; never logs keys or bodies."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

_PROBES = frozenset(("/health", "/ping", "/ready", "/metrics"))
"""Polled by machines: logged only if the status is not 200."""


class AccessLog:
    """Logs client, method, path, status, duration and id of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = time.monotonic()
        status: int | None = None
        request_id = ""

        async def watch(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                for name, value in message["headers"]:
                    if name == b"x-request-id":
                        request_id = value.decode()
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if status != 200 or scope["path"] not in _PROBES:
                _log(scope, status, request_id, time.monotonic() - started_at)


def _log(scope: Scope, status: int | None, request_id: str, seconds: float) -> None:
    client = scope.get("client")
    # The path contains decoded bytes from the client: escape it to keep one line per response.
    path = scope["path"].encode("unicode_escape").decode()
    fields = {
        "client": client[0].removeprefix("::ffff:") if client else "",
        "method": scope["method"],
        "path": path,
        "status": status,
        "duration_ms": round(1000 * seconds, 1),
        "request_id": request_id,
    }
    logger.info(
        "%s %s %s %s in %.1f ms%s",
        fields["client"] or "-",
        scope["method"],
        path,
        status or "hung up",
        1000 * seconds,
        f" request {request_id}" if request_id else "",
        extra=fields,
    )
