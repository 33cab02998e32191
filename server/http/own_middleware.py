"""ASGI middleware of the operator's, named by where it is imported from."""

import importlib
import inspect
from typing import Any, cast

from fastapi import FastAPI


class BadMiddleware(ValueError):
    """It cannot be imported, or is none; the message names it."""


def add_own(app: FastAPI, paths: tuple[str, ...]) -> None:
    """Put middleware around an application, the first outermost.

    A class is one of ASGI, made with the application that it is put around. A coroutine function
    takes a request and what answers it (`@app.middleware("http")`).

    Raises:
        BadMiddleware: one of them cannot be used.
    """
    for path in reversed(paths):
        found = _imported(path)
        if inspect.isclass(found):
            app.add_middleware(cast("Any", found))
        elif inspect.iscoroutinefunction(found):
            app.middleware("http")(found)
        else:
            raise BadMiddleware(f"--middleware {path}: neither a class nor a coroutine function")


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadMiddleware(f"--middleware {path}: {error}") from error
