"""The HTTP application: assembly of all routers, guards and error handlers."""

import functools

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from engine.shared.version import SWELL_VERSION
from server.access.guards import install
from server.api import invocations, meta, openapi, status, tokenize
from server.api.chat import endpoint as chat
from server.api.completions import endpoint as completions
from server.api.messages import endpoint as messages
from server.api.responses import endpoint as responses
from server.api.responses import stored
from server.api.services import Services
from server.api.vectors import endpoint as vectors
from server.errors import ApiError
from server.http.errors import client_error, no_such_path
from server.http.middleware import LoadHeader, RequestIdMiddleware, add_custom_middleware
from server.observe.access_log import AccessLog
from server.observe.engine_metrics import engine_load
from server.router.generation_client import NoEngineAvailable

ROUTERS = (
    completions.router,
    chat.router,
    responses.router,
    messages.router,
    vectors.router,
    invocations.router,
    tokenize.router,
    meta.router,
    status.router,
    openapi.router,
)
"""Routers of every front end, the most frequently used ones first."""


def build_app(services: Services) -> FastAPI:
    """Build the application of a front end."""
    config, metrics, access = services.config, services.metrics, services.access
    app = FastAPI(
        title="Swell",
        version=SWELL_VERSION,
        description="OpenAI-compatible API over data-parallel engines. Unknown fields of request "
        "bodies are ignored.",
        redirect_slashes=False,
        openapi_url=None,  # served by `server.api.openapi`
        docs_url=None,
        redoc_url=None,
        # Spans and metrics come from `server.observe`; this skips a lookup per request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.services = services
    routers = [*ROUTERS]
    if services.store is not None:
        routers.append(stored.router)
    if config.http.enable_tokenizer_info_endpoint:
        routers.append(meta.tokenizer_router)
    if access.has_admin:
        from server.api.admin.routers import ADMIN_ROUTERS  # 0.9 MB, and most servers have no key

        routers += ADMIN_ROUTERS
        of_operators = [route for router in ADMIN_ROUTERS for route in router.routes]
        access.admin_paths = frozenset(r.path for r in of_operators if isinstance(r, APIRoute))
    for router in routers:
        app.router.routes += router.routes  # with `include_router` each request is matched twice
    for kind in (ApiError, NoEngineAvailable, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer_error)
    # The last one added is the outermost.
    app.add_middleware(LoadHeader, load=functools.partial(engine_load, services.client))
    install(app, access, config, metrics)
    add_custom_middleware(app, config.http.middleware)
    if config.http.access_log:
        app.add_middleware(AccessLog)
    app.add_middleware(RequestIdMiddleware, root_path=config.http.root_path.rstrip("/"))
    openapi.serve_document(app, config.http.root_path.rstrip("/"))
    if config.http.middleware:  # one that cannot be constructed fails the start, not requests
        app.middleware_stack = app.build_middleware_stack()
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    name = request.headers.get("x-request-id", "-")
    answer, path = client_error(error, name), request.scope["path"]
    if isinstance(error, HTTPException) and error.status_code == 404:
        served = {route.path for route in request.app.routes if "{" not in route.path}
        answer.message = no_such_path(path, served)
    return Response(
        answer.body(path),
        answer.status,
        # Unexpected errors are answered outside the middleware that adds the request ID.
        headers={**dict(answer.headers), "x-request-id": name},
        media_type="application/json",
    )
