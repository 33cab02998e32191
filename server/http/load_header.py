"""Load in the headers of answers, for load balancers that ask for it (ORCA).

https://github.com/envoyproxy/envoy/issues/6614 has the two forms; the names are vLLM's.
"""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASKED, TOLD = b"endpoint-load-metrics-format", b"endpoint-load-metrics"

Load = Callable[[], dict[str, float]]


class LoadHeader:
    """Plain ASGI around an application: answers tell the load if their requests ask for it."""

    def __init__(self, app: ASGIApp, load: Load) -> None:
        """`load` returns named numbers."""
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = b""
        if scope["type"] == "http" and scope["method"] == "POST":
            form = next((value for name, value in scope["headers"] if name == ASKED), b"")
        value = self._value(form.strip().lower()) if form else None
        if value is None:
            await self._app(scope, receive, send)
            return

        def told(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (TOLD, value)]
            return send(message)

        await self._app(scope, receive, told)

    def _value(self, form: bytes) -> bytes | None:
        match form:
            case b"text":
                pairs = [f"named_metrics.{name}={value:g}" for name, value in self._load().items()]
                return f"TEXT {', '.join(pairs)}".encode()
            case b"json":
                return b"JSON " + msgspec.json.encode({"named_metrics": self._load()})
            case _:
                return None
