"""Routes as lists of an application: how an endpoint is documented, reached and forwarded."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from server.api.context import Context
from server.api.openapi import REQUEST_HEADERS, Responses
from server.http.call import Call, raw_endpoint

Handler = Callable[[Call, Context], Awaitable[None]]
"""What serves a request whose body is read by the endpoint itself."""


def get(path: str, endpoint: Callable[..., Any], responses: Responses) -> APIRoute:
    """Return a route that reads no body."""
    return plain("GET", path, endpoint, responses)


def plain(method: str, path: str, endpoint: Callable[..., Any], responses: Responses) -> APIRoute:
    """Return a route of any method whose body, if there is one, means nothing."""
    return APIRoute(
        path,
        endpoint,
        methods=[method],
        responses=responses,
        response_class=Response,
        response_model=None,
    )


def post(
    path: str, handler: Handler, body: Any, responses: Responses, context: Context
) -> APIRoute:
    """Return a route that is documented like any other and served by a raw endpoint."""

    async def documented(request: BaseModel) -> None: ...

    documented.__annotations__["request"] = body
    documented.__name__ = handler.__name__
    documented.__doc__ = handler.__doc__
    route = APIRoute(
        path,
        documented,
        methods=["POST"],
        responses=responses,
        response_class=Response,
        response_model=None,
        openapi_extra=REQUEST_HEADERS if "text/event-stream" in responses[200]["content"] else None,
    )

    async def serve(call: Call) -> None:
        await handler(call, context)

    route.app = raw_endpoint(path, serve, context.metrics, context.body_limits)
    return route


def post_for_model(
    path: str, handler: Handler, body: Any, responses: Responses, context: Context
) -> APIRoute:
    """Return a route as `post` does; another server answers what is for its models."""
    forwarder = context.forwarder

    @functools.wraps(handler)
    async def here_or_elsewhere(call: Call, context: Context) -> None:
        await context.client.acquainted()
        model = None if forwarder is None else forwarder.elsewhere(call, context.own_models)
        if forwarder is None or model is None:
            await handler(call, context)
        else:
            await forwarder.forward(call, model)

    return post(path, here_or_elsewhere, body, responses, context)
