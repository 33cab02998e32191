"""ASGI middleware for all requests: paths, request IDs, load headers, and operators' own.

A trailing slash and a proxy's prefix are removed from paths before anything else, including the
guards, sees them. Every response has the request ID.
"""

import importlib
import inspect
import re
import secrets
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.shared.plugins import load_plugin

REQUEST_ID = re.compile(rb"[!-~]{1,256}")
"""Valid request IDs from clients."""
_HEADER = b"x-request-id"
REQUEST_HEADER, RESPONSE_HEADER = b"endpoint-load-metrics-format", b"endpoint-load-metrics"

Load = Callable[[], dict[str, float]]


class RequestIdMiddleware:
    """Normalizes the path of every request and assigns its request ID."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """`root_path` is a prefix that a proxy may leave in place, as `/swell`; empty for none."""
        self._app = app
        self._root = root_path

    # No extra coroutines: resuming a task that waits for tokens passes through every nested one.

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        scope["path"] = plain_path(scope["path"], self._root)
        scope["root_path"] = self._root
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the protocol's scope keeps HEAD and sends no body
        given = [value for header, value in scope["headers"] if header == _HEADER]
        name = (
            given[-1]
            if given and REQUEST_ID.fullmatch(given[-1])
            else secrets.token_hex(16).encode()
        )
        if given != [name]:
            others = [pair for pair in scope["headers"] if pair[0] != _HEADER]
            scope["headers"] = [*others, (_HEADER, name)]

        def named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                if not any([header == _HEADER for header, _ in headers]):
                    headers = message["headers"] = [*headers, (_HEADER, name)]
                if scope["path"].startswith("/v1/messages"):
                    message["headers"] = [*headers, (b"request-id", name)]  # Anthropic's name
            return send(message)

        return self._app(scope, receive, named)


def plain_path(path: str, root: str) -> str:
    """Return a path without prefixes and trailing slashes.

    The prefix is removed repeatedly: if one were left, the application's router would strip it
    after the guards, which would have checked a different path.
    """
    while root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return path.rstrip("/") or "/"


class LoadHeader:
    """Adds load to response headers, for load balancers that request it (ORCA).

    https://github.com/envoyproxy/envoy/issues/6614 defines the two formats; the names are vLLM's.
    """

    def __init__(self, app: ASGIApp, load: Load) -> None:
        """`load` returns numbers by name."""
        self._app = app
        self._load = load

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        form = b""
        if scope["type"] == "http" and scope["method"] == "POST":
            form = next((value for name, value in scope["headers"] if name == REQUEST_HEADER), b"")
        value = self._value(form.strip().lower()) if form else None
        if value is None:
            return self._app(scope, receive, send)

        def send_with_load(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (RESPONSE_HEADER, value)]
            return send(message)

        return self._app(scope, receive, send_with_load)

    def _value(self, form: bytes) -> bytes | None:
        match form:
            case b"text":
                pairs = [f"named_metrics.{name}={value:g}" for name, value in self._load().items()]
                return f"TEXT {', '.join(pairs)}".encode()
            case b"json":
                return b"JSON " + msgspec.json.encode({"named_metrics": self._load()})
            case _:
                return None


class BadMiddleware(ValueError):
    """A middleware cannot be imported or is invalid; the message names it."""


def add_custom_middleware(app: FastAPI, paths: tuple[str, ...]) -> None:
    """Wrap an application in middleware, the first outermost.

    A path is `MODULE.NAME`, `FILE.py:NAME`, or the name of an entry point of `swell.middleware`.
    A class is ASGI middleware, constructed with the application that it wraps. A coroutine function
    takes a request and the next handler (`@app.middleware("http")`).

    Raises:
        BadMiddleware: one of them cannot be used.
        BadPlugin: an entry point cannot be loaded.
    """
    for path in reversed(paths):
        if path and not {".", ":"} & {*path}:
            found = load_plugin("swell.middleware", path, "--middleware", lambda found: found)
        else:
            found = _imported(path)
        if inspect.isclass(found):
            app.add_middleware(cast("Any", partial(_construct, path, cast("Any", found))))
        elif inspect.iscoroutinefunction(found):
            app.middleware("http")(found)
        else:
            raise BadMiddleware(f"--middleware {path}: neither a class nor a coroutine function")


def _construct(path: str, kind: Callable[[ASGIApp], Any], app: ASGIApp) -> Any:
    try:
        return kind(app)
    except Exception as error:
        raise BadMiddleware(f"--middleware {path}: {type(error).__name__}: {error}") from error


def _imported(path: str) -> Any:
    file, colon, name = path.rpartition(":")
    module, _, attribute = path.rpartition(".")
    try:
        if colon:
            return getattr(_module_of_file(Path(file)), name)
        return getattr(importlib.import_module(module), attribute)
    except (OSError, SyntaxError, ImportError, AttributeError, ValueError) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = (
                ". Modules are not looked for in the current directory: name the file, as in "
                "./FILE.py:NAME, or set PYTHONPATH"
            )
        raise BadMiddleware(f"--middleware {path}: {error}{hint}") from error


def _module_of_file(file: Path) -> ModuleType:
    spec = spec_from_file_location(f"swell_middleware_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up a class's module there
    spec.loader.exec_module(module)
    return module
