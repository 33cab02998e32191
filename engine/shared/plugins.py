"""Plugins (entry points of installed packages), and install commands of extras."""

import shlex
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, requires
from typing import Any, TypeVar

T = TypeVar("T")


class BadPlugin(ValueError):
    """A plugin is not installed or unusable; the message names it and the reason."""


def offered(group: str) -> list[str]:
    """Return the names of a group's entry points."""
    return sorted({each.name for each in entry_points(group=group)})


def load_plugin(group: str, name: str, origin: str, use: Callable[[Any], T]) -> T:
    """Load an entry point, and return `use` applied to it.

    Args:
        origin: origin of the name, for errors: a flag, or a file.
        use: exceptions it raises count as the plugin's.

    Raises:
        BadPlugin: no package provides it, several do, or it fails.
    """
    found = {each.value: each for each in entry_points(group=group, name=name)}
    if not found:
        known = ", ".join(offered(group)) or "none"
        raise BadPlugin(
            f"{origin} {name}: no installed package has such an entry point in {group!r}; "
            f"there are {known}"
        )
    if len(found) > 1:
        raise BadPlugin(
            f"{origin} {name}: several entry points in {group!r} have this name: "
            + ", ".join(sorted(found))
        )
    [(value, entry)] = found.items()
    try:
        return use(entry.load())
    except Exception as error:
        of = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
        raise BadPlugin(
            f"{origin} {name}: the plugin {value}{of} cannot be used: "
            f"{type(error).__name__}: {error}"
        ) from error


def instance_of(kind: type[T]) -> Callable[[Any], T]:
    """Return a function for `load_plugin` that checks that a plugin is an instance of a class."""

    def check(found: Any) -> T:
        if not isinstance(found, kind):
            raise TypeError(f"expected {kind.__name__}, got {type(found).__name__}")
        return found

    return check


def install_command(extra: str) -> str:
    """Return the command that installs an extra's requirements, however Swell was installed."""
    try:
        stated = requires("swell") or []
    except PackageNotFoundError:  # running from a source tree
        stated = []
    markers = (f'extra == "{extra}"', f"extra == '{extra}'")
    requirements = [each.partition(";")[0].strip() for each in stated if each.endswith(markers)]
    return shlex.join(
        [sys.executable, "-m", "pip", "install", *(requirements or [f"swell[{extra}]"])]
    )
