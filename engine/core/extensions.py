"""Functions of installed packages that operators can call in engines, by name.

A package registers a function as an entry point of the group `swell.worker_extensions`; the setting
`worker_extensions` lists the callable ones. Nothing else in a call is resolved by name: arguments
are JSON, converted according to the function's annotations, and the result is returned as JSON.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast, get_type_hints

import msgspec

from engine.batch.executor import CannotDo, Executor
from engine.shared.plugins import load_plugin

GROUP = "swell.worker_extensions"

MAX_RESULT = 1 << 20
"""Maximum bytes of a result, as JSON."""


class Worker(NamedTuple):
    """The first argument of every extension function."""

    rank: int
    incarnation: int
    executor: Executor


class Extensions:
    """The callable functions."""

    def __init__(self, names: Sequence[str], worker: Worker) -> None:
        """Load functions.

        Raises:
            BadPlugin: no installed package provides one of them, or loading it fails.
        """
        self._worker = worker
        self._functions: dict[str, Callable[..., Any]] = {
            name: load_plugin(GROUP, name, "--worker-extensions", _checked) for name in names
        }

    def call(self, name: str, args: str, kwargs: str) -> str:
        """Call a function with JSON arguments and return its result as JSON.

        Raises:
            CannotDo: there is no such function, or the arguments or the result are invalid.
        """
        function = self._functions.get(name)
        if function is None:
            known = ", ".join(sorted(self._functions)) or "none: see --worker-extensions"
            raise CannotDo(f"there is no callable method {name!r}; there are {known}")
        signature, hints = inspect.signature(function), get_type_hints(function)
        try:
            given = msgspec.json.decode(args, type=list[Any])
            named = msgspec.json.decode(kwargs, type=dict[str, Any])
            bound = signature.bind(self._worker, *given, **named)
            first = next(iter(signature.parameters))
            for parameter, value in bound.arguments.items():
                if parameter != first and parameter in hints:
                    bound.arguments[parameter] = msgspec.convert(value, hints[parameter])
        except (TypeError, msgspec.DecodeError, StopIteration) as error:
            raise CannotDo(f"wrong arguments for {name}: {error}") from None
        result = msgspec.json.encode(function(*bound.args, **bound.kwargs))
        if len(result) > MAX_RESULT:
            raise CannotDo(f"{name} returned {len(result)} bytes, more than {MAX_RESULT}")
        return result.decode()


def _checked(found: Any) -> Callable[..., Any]:
    """Return a function whose parameters and annotations can be read."""
    if not callable(found):
        raise TypeError(f"expected a function, got {type(found).__name__}")
    inspect.signature(found)
    get_type_hints(found)
    return cast("Callable[..., Any]", found)
