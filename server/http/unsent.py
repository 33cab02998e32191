"""How many bytes of answers may wait for clients that do not read them."""

from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.tenants import EVERYBODY, SCOPE_KEY
from server.errors import ApiError, unavailable
from server.limits import MAX_UNSENT, MAX_UNSENT_OF_ONE
from server.tenant_budget import TenantBudget

FREE_BYTES = 2**13
"""What a connection may buffer without being counted, so that as many as there may be fit."""

_TOO_MUCH_OF_ONE = ApiError(
    429,
    "Too many bytes of answers are unread: read them, then retry.",
    code="rate_limit_exceeded",
    headers=(("retry-after", "1"),),
)
_TOO_MUCH = unavailable("Too many bytes of answers wait to be read; try again.")


class UnsentBudget:
    """Bytes of answers that are held until their clients have read them, by tenant.

    They count from the head of an answer whose length is known, or from when a part of a stream is
    sent, until no more of them is buffered than a transport always may.
    """

    def __init__(self) -> None:
        self._held = TenantBudget(MAX_UNSENT_OF_ONE, MAX_UNSENT)

    def counted(self, app: ASGIApp, drain: Callable[[], Awaitable[None]]) -> ASGIApp:
        """Return an application whose answers on one connection are counted.

        Args:
            app: notes the tenant in the scope.
            drain: waits until the connection buffers little, or is closed.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            held = 0
            tenant = 0
            refused = False

            def hold(size: int) -> None:
                nonlocal held
                held += size
                self._held.take(tenant, size)

            def release() -> None:
                nonlocal held
                self._held.give_back(tenant, held)
                held = 0

            async def send_counted(message: Message) -> None:
                nonlocal tenant, refused
                if refused:
                    return
                if message["type"] == "http.response.start":
                    tenant = scope.get(SCOPE_KEY, EVERYBODY).id
                    size = _length(message)
                    if size > FREE_BYTES:
                        exceeded = self._held.exceeded(tenant, size)
                        if exceeded is not None:
                            refused = True
                            error = _TOO_MUCH_OF_ONE if exceeded == "own" else _TOO_MUCH
                            await error.send(scope["path"], send)
                            return
                        hold(size)
                    await send(message)
                    return
                size = len(message.get("body", b""))
                if held or size <= FREE_BYTES:
                    await send(message)
                else:
                    hold(size)
                    await send(message)
                    await drain()
                    release()

            try:
                await app(scope, receive, send_counted)
                if held:
                    await drain()
            finally:
                release()

        return answer


def _length(start: Message) -> int:
    for name, value in start.get("headers", ()):
        if name == b"content-length":
            return int(value)
    return 0
