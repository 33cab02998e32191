"""What every request and every answer have in common, before keys are looked at.

A path means the same with a slash behind it and with the prefix of a proxy before it; all that
comes after, the guards included, sees the path alone. Every answer names its request.
"""

import re
import secrets
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = re.compile(rb"[!-~]{1,256}")
"""What a client may call its request."""
_HEADER = b"x-request-id"


class RequestIdMiddleware:
    """Plain ASGI around an application."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """`root_path` is the prefix that a proxy may leave on, as `/swell`; empty for none."""
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = plain_path(scope["path"], self._root)
        scope["root_path"] = self._root
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the protocol, which has the other, sends no body
        given = [value for header, value in scope["headers"] if header == _HEADER]
        name = (
            given[-1]
            if given and REQUEST_ID.fullmatch(given[-1])
            else secrets.token_hex(16).encode()
        )
        if given != [name]:
            others = [pair for pair in scope["headers"] if pair[0] != _HEADER]
            scope["headers"] = [*others, (_HEADER, name)]

        # No coroutine of its own: a stream sends once per token.
        def named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                if not any([header == _HEADER for header, _ in headers]):
                    message["headers"] = [*headers, (_HEADER, name)]
            return send(message)

        await self._app(scope, receive, named)


def plain_path(path: str, root: str) -> str:
    """Return a path without prefixes and slashes that mean nothing.

    The prefix is taken off as often as it is there: were one left, the application's router would
    take it off behind the guards, which had then judged another path.
    """
    while root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return path.rstrip("/") or "/"
