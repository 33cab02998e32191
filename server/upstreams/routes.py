"""Models of other servers, from a file that operators can change at any time."""

import logging
import re
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.shared.watched_file import WatchedFile

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 1.0
"""Seconds between checks for a changed file."""

MAX_FILE_BYTES = 1 << 20
MAX_ROUTES = 1024

_ORIGIN = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?")


class BadModelRoutes(Exception):
    """The file is unusable; the message is shown to the user."""


_Routes = dict[Annotated[str, Meta(min_length=1, max_length=256)], str]


def read_routes(path: Path) -> dict[str, str]:
    """Return the server address of each model in a file of `NAME: URL` lines.

    Raises:
        BadModelRoutes: the file is unreadable or malformed.
    """
    import yaml  # imported only by front ends that have such a file

    what = f"--model-routes {path}"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise BadModelRoutes(f"{what} is larger than {MAX_FILE_BYTES} bytes")
        routes = msgspec.convert(yaml.safe_load(text) or {}, _Routes)
    except (OSError, yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        raise BadModelRoutes(f"{what} cannot be used: {error}") from error
    if len(routes) > MAX_ROUTES:
        raise BadModelRoutes(f"{what} has more than {MAX_ROUTES} models")
    for name, url in routes.items():
        if not _ORIGIN.fullmatch(url):
            raise BadModelRoutes(
                f"{what}: {name} needs the URL of a server, as http://HOST:PORT, not {url!r}"
            )
    return {name: url.rstrip("/") for name, url in routes.items()}


class ModelRoutes:
    """The routes in a file, reloaded on change; an unusable version is ignored."""

    def __init__(self, path: str) -> None:
        """Load the file.

        Raises:
            BadModelRoutes: it is unusable.
        """
        self._file = WatchedFile(path)
        self._check_at = 0.0
        self._routes = read_routes(self._file.path)

    def current(self) -> dict[str, str]:
        """Return the server address of each model."""
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + CHECK_INTERVAL
            if self._file.changed():
                try:
                    self._routes = read_routes(self._file.path)
                except BadModelRoutes as error:
                    logger.error("keeping the old model routes: %s", error)
                else:
                    logger.info("reloaded the model routes: %s", ", ".join(self._routes) or "none")
        return self._routes
