"""Plugins and extras: entry points of installed packages, and how to install what is missing."""

import shlex
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, requires
from typing import Any, TypeVar

T = TypeVar("T")


class BadPlugin(ValueError):
    """A plugin is not installed, or cannot be used; the message names it and the reason."""


def offered(group: str) -> list[str]:
    """Return the names of the entry points of a group."""
    return sorted({each.name for each in entry_points(group=group)})


def load_plugin(group: str, name: str, asked_by: str, use: Callable[[Any], T]) -> T:
    """Load an entry point, and return what `use` makes of it.

    Args:
        asked_by: what names the plugin, for errors: a flag, or a file.
        use: whatever it raises counts as the plugin's error.

    Raises:
        BadPlugin: no package offers it, several do, or it fails.
    """
    found = {each.value: each for each in entry_points(group=group, name=name)}
    if not found:
        known = ", ".join(offered(group)) or "none"
        raise BadPlugin(
            f"{asked_by} {name}: no installed package has such an entry point in {group!r}; "
            f"there are {known}"
        )
    if len(found) > 1:
        raise BadPlugin(
            f"{asked_by} {name}: several entry points in {group!r} have this name: "
            + ", ".join(sorted(found))
        )
    [(value, entry)] = found.items()
    try:
        return use(entry.load())
    except Exception as error:
        of = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
        raise BadPlugin(
            f"{asked_by} {name}: the plugin {value}{of} cannot be used: "
            f"{type(error).__name__}: {error}"
        ) from error


def instance_of(kind: type[T]) -> Callable[[Any], T]:
    """Return a check, for `load_plugin`, that a plugin is an instance of a class."""

    def check(found: Any) -> T:
        if not isinstance(found, kind):
            raise TypeError(f"it is no {kind.__name__} but {type(found).__name__}")
        return found

    return check


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of Swell needs, wherever Swell came from."""
    try:
        stated = requires("swell") or []
    except PackageNotFoundError:  # run from its sources
        stated = []
    markers = (f'extra == "{extra}"', f"extra == '{extra}'")
    wanted = [each.partition(";")[0].strip() for each in stated if each.endswith(markers)]
    return shlex.join([sys.executable, "-m", "pip", "install", *(wanted or [f"swell[{extra}]"])])
