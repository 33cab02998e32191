"""ASGI middleware of the operator's, named by where it is imported from."""

import importlib
import inspect
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fastapi import FastAPI

from engine.shared.plugins import load_plugin


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
    """Return what `MODULE.NAME` or `FILE.py:NAME` names."""
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
