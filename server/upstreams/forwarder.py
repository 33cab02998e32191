"""Forwards requests for models of other servers, and streams their responses back.

The client's key is forwarded, so that the other server's authentication, limits and tenant counts
apply. Nothing is forwarded twice: a request that came from another server, as its `Via` header
shows, is answered here or refused.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Collection

import httpx
import msgspec

from server.errors import MESSAGES_PREFIX, rate_limited, unavailable
from server.http.call import Call
from server.observe.metrics import FrontEndMetrics
from server.tenant_budget import TenantBudget
from server.upstreams.routes import ModelRoutes

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
"""Maximum connections to all servers together; further requests wait for `_POOL_SECONDS`."""
MAX_REQUESTS_OF_ONE = 768
"""Maximum requests of one tenant at a time, so that one tenant leaves connections to others."""

_CONNECT_SECONDS = 5.0
_WRITE_SECONDS = 60.0
_POOL_SECONDS = 5.0
_IDLE_SECONDS = 2.0
"""Idle timeout, shorter than servers' own, so that no request meets a connection being closed."""

_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]
"""Keep-alive options: responses may take long, but a dead peer is detected within 30 seconds."""

_CONNECT_TRIES = 4
_FIRST_PAUSE = 0.1
"""Seconds before an unreachable server is retried; doubles each time."""

_EVENT_END = b"\n\n"
_VIA = b"1.1 swell"
_SENT_ON = frozenset(
    (
        b"accept",
        b"anthropic-beta",
        b"anthropic-version",
        b"authorization",
        b"content-type",
        b"openai-beta",
        b"openai-organization",
        b"openai-project",
        b"traceparent",
        b"tracestate",
        b"user-agent",
        b"x-api-key",
        b"x-data-parallel-rank",
    )
)
_SENT_BACK = frozenset(
    (
        b"cache-control",
        b"content-length",
        b"content-type",
        b"endpoint-load-metrics",
        b"retry-after",
        b"www-authenticate",
        b"x-accel-buffering",
        b"x-should-retry",
    )
)


class _WithModel(msgspec.Struct):
    model: str = ""


class Forwarder:
    """Forwards requests to the servers of their models."""

    def __init__(self, routes: ModelRoutes, metrics: FrontEndMetrics) -> None:
        self._routes = routes
        self._metrics = metrics
        self._requests = TenantBudget(MAX_REQUESTS_OF_ONE, MAX_CONNECTIONS)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(
                None, connect=_CONNECT_SECONDS, write=_WRITE_SECONDS, pool=_POOL_SECONDS
            ),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(
                    max_connections=MAX_CONNECTIONS,
                    max_keepalive_connections=MAX_CONNECTIONS,
                    keepalive_expiry=_IDLE_SECONDS,
                ),
                trust_env=False,
                socket_options=_KEEPALIVE,
            ),
            follow_redirects=False,
        )

    @property
    def models(self) -> list[str]:
        """The names of all models of other servers."""
        return list(self._routes.current())

    def remote_model(self, call: Call, here: Collection[str]) -> str | None:
        """Return the model that a call names if another server has it and it is not one of `here`.

        None for a call that was forwarded from another server.
        """
        routes = self._routes.current()
        headers = call.scope["headers"]
        if not routes or any(name == b"via" and _VIA in value for name, value in headers):
            return None
        try:
            name = msgspec.json.decode(call.content, type=_WithModel).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # errors in the body are reported where it is parsed in full
        return name if name in routes and name not in here else None

    async def forward(self, call: Call, model: str) -> None:
        """Answer a call with the response of a model's server.

        Raises:
            ApiError: 429, the client's key has too many such requests; 503, the server cannot be
                reached.
            ClientDisconnected: the client disconnected.
        """
        with call:
            if self._requests.exceeded(call.key, 1) == "own":
                raise rate_limited(
                    "Too many of your requests are at the servers of other models; try again."
                )
            with self._requests.holding(call.key, 1):
                response = await self._forward(call, model)
                call.forget_body()
                self._metrics.count("forwarded_requests", model, response.status_code)
                try:
                    await _answer(call, response)
                finally:
                    await response.aclose()

    async def _forward(self, call: Call, model: str) -> httpx.Response:
        """Send a call to a model's server; return the response once its headers have arrived.

        Connecting to an unreachable server is retried, since it has received nothing: it may be
        in the middle of a replacement.
        """
        pause = _FIRST_PAUSE
        for left in reversed(range(_CONNECT_TRIES)):
            url = self._routes.current().get(model)
            if url is None:
                break
            request = self._client.build_request(
                "POST", url + call.path, content=_body(call), headers=_headers(call)
            )
            try:
                return await self._client.send(request, stream=True)
            except httpx.PoolTimeout:
                break
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                logger.warning(
                    "the server of model %s, %s, cannot be reached: %s", model, url, error
                )
                if not left:
                    break
            except httpx.HTTPError as error:
                logger.warning("the server of model %s, %s, failed: %s", model, url, error)
                break
            await asyncio.sleep(pause)
            pause *= 2
        self._metrics.count("forwarded_requests", model, 503)
        raise unavailable(f"The server of the model {model!r} cannot be reached now; try again.")

    async def close(self) -> None:
        """Close all connections; unfinished streams are cut off."""
        await self._client.aclose()


def _headers(call: Call) -> list[tuple[bytes, bytes]]:
    headers = [(name, value) for name, value in call.scope["headers"] if name in _SENT_ON]
    return [
        *headers,
        (b"accept-encoding", b"identity"),
        (b"content-length", str(len(call.content)).encode()),
        (b"x-request-id", call.request_id.encode()),
        (b"via", _VIA),
    ]


async def _body(call: Call) -> AsyncIterator[bytes]:
    """Yield the body of a call, without keeping a reference in the request."""
    yield call.content


async def _answer(call: Call, response: httpx.Response) -> None:
    """Send a response back, as fast as the client reads it.

    An event stream that is cut off between two events ends with an error event.
    """
    given = [(name.lower(), value) for name, value in response.headers.raw]
    is_stream = dict(given).get(b"content-type", b"").startswith(b"text/event-stream")
    last = _EVENT_END
    await call.start(
        response.status_code, [(name, value) for name, value in given if name in _SENT_BACK]
    )
    try:
        async for part in response.aiter_raw():
            last = part
            await call.write(part, more=True)
    except httpx.HTTPError as error:
        if not is_stream or not last.endswith(_EVENT_END):
            raise
        logger.warning("a forwarded stream was interrupted: %r", error)
        broken = unavailable("The connection to the model's server was lost; try again.")
        name = b"event: error\n" if call.path.startswith(MESSAGES_PREFIX) else b""
        await call.write(b"%bdata: %b\n\n" % (name, broken.body(call.path)), more=True)
    await call.write(b"", more=False)
