"""A way past the framework's router for requests whose speed matters."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send


class Direct:
    """Plain ASGI right before the router, behind all guards.

    What it does not know, other methods of the same paths included, goes on to the router.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, ASGIApp]) -> None:
        """`endpoints` answer POST requests, by path; they turn their errors into answers."""
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._app
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"], endpoint)
        await endpoint(scope, receive, send)
