"""ASGI around the application: what all requests and answers have in common, and operators' own.

A path means the same with a slash behind it and with the prefix of a proxy before it; all that
comes after, the guards included, sees the path alone. Every answer names its request.
"""

import importlib
import inspect
import re
import secrets
import sys
from collections.abc import Awaitable, Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.shared.plugins import load_plugin

REQUEST_ID = re.compile(rb"[!-~]{1,256}")
"""What a client may call its request."""
_HEADER = b"x-request-id"
ASKED, TOLD = b"endpoint-load-metrics-format", b"endpoint-load-metrics"

Load = Callable[[], dict[str, float]]


class RequestIdMiddleware:
    """Gives every request its path and its name."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """`root_path` is the prefix that a proxy may leave on, as `/swell`; empty for none."""
        self._app = app
        self._root = root_path

    # No coroutines of their own: what waits for tokens is resumed through all that wait for it.

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
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

        def named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                if not any([header == _HEADER for header, _ in headers]):
                    message["headers"] = [*headers, (_HEADER, name)]
            return send(message)

        return self._app(scope, receive, named)


def plain_path(path: str, root: str) -> str:
    """Return a path without prefixes and slashes that mean nothing.

    The prefix is taken off as often as it is there: were one left, the application's router would
    take it off behind the guards, which had then judged another path.
    """
    while root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return path.rstrip("/") or "/"


class LoadHeader:
    """Load in the headers of answers, for load balancers that ask for it (ORCA).

    https://github.com/envoyproxy/envoy/issues/6614 has the two forms; the names are vLLM's.
    """

    def __init__(self, app: ASGIApp, load: Load) -> None:
        """`load` returns named numbers."""
        self._app = app
        self._load = load

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        form = b""
        if scope["type"] == "http" and scope["method"] == "POST":
            form = next((value for name, value in scope["headers"] if name == ASKED), b"")
        value = self._value(form.strip().lower()) if form else None
        if value is None:
            return self._app(scope, receive, send)

        def told(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (TOLD, value)]
            return send(message)

        return self._app(scope, receive, told)

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
    """It cannot be imported, or is none; the message names it."""


def add_own(app: FastAPI, paths: tuple[str, ...]) -> None:
    """Put middleware around an application, the first outermost.

    A path is `MODULE.NAME`, `FILE.py:NAME`, or the name of an entry point of `swell.middleware`.
    A class is one of ASGI, made with the application that it is put around. A coroutine function
    takes a request and what answers it (`@app.middleware("http")`).

    Raises:
        BadMiddleware: one of them cannot be used.
        BadPlugin: the same, of an entry point.
    """
    for path in reversed(paths):
        if path.isidentifier():
            found = load_plugin("swell.middleware", path, "--middleware", lambda found: found)
        else:
            found = _imported(path)
        if inspect.isclass(found):
            app.add_middleware(cast("Any", found))
        elif inspect.iscoroutinefunction(found):
            app.middleware("http")(found)
        else:
            raise BadMiddleware(f"--middleware {path}: neither a class nor a coroutine function")


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
        raise ImportError(f"{file} is no Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for the module of a class there
    spec.loader.exec_module(module)
    return module
